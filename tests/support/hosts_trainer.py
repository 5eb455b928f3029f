"""A job of several ranks on several hosts, for torchrun. Each rank has a ledger in the folder of the test.

hosts_trainer.py FOLDER ITERATIONS FULL_FROM

The store takes no checkpoint from iteration FULL_FROM on. Files in the folder say how far to train (`leash`), and
where a rank is to stop so that its host can be lost (`strike`): there it makes the file `struck`, and goes no
further.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

import holdfast
from holdfast.engine.training import Training
from holdfast.peers.replica_sender import ReplicaSender
from holdfast.peers.tier import PeerMemoryTier
from holdfast.save import completion_marker
from holdfast.save.snapshotter import Snapshotter
from holdfast.store.local import LocalWriter
from tests.support.fault_injection import run_before
from tests.support.memory_tier_torchrun_trainer import RankedWork

JOB, EVERY = "hosts", 5
POLL_SECONDS = 0.005
STEP_SECONDS = 0.02
"""So that an interval takes longer than sending a snapshot."""


def alone(stage: Any, iterations: int) -> list[str]:
    """What this rank comes to where nothing happens, and without Holdfast."""
    work = RankedWork("ddp")
    return [work.outcome(work.iterate()) for _ in range(iterations)]


class Moments:
    """The moments at which the test may lose this rank's host, and notes of what it has sent and read."""

    def __init__(self, folder: Path, full_from: int) -> None:
        self._folder, self._full_from, self._rank = folder, full_from, dist.get_rank()

    def watch(self) -> None:
        run_before(Snapshotter, "copy", lambda _, run: self.reach("copying", run.draft.iteration))
        run_before(completion_marker, "write_marker", lambda _, draft: self.reach("sealing", draft.iteration))
        run_before(LocalWriter, "write", lambda writer, *_: self._write(int(writer._final.name.partition("-")[0])))
        run_before(PeerMemoryTier, "load", lambda *_: self.reach("restarting", sys.maxsize))
        run_before(Training, "load", lambda *_: self.note("read", 0))
        send, send_payload = ReplicaSender._send, ReplicaSender._send_payload

        def sending(sender: Any, run: Any) -> bool:
            is_sent = send(sender, run)
            if is_sent:
                self.note("sent", run.draft.iteration)
            return is_sent

        def sending_payload(sender: Any, *arguments: Any) -> None:
            self.reach("sending", sender.sent_iteration + EVERY)
            send_payload(sender, *arguments)
            self.reach("sent half", sender.sent_iteration + EVERY)

        ReplicaSender._send, ReplicaSender._send_payload = sending, sending_payload  # type: ignore[method-assign]

    def reach(self, moment: str, iteration: int) -> None:
        with contextlib.suppress(OSError, ValueError):
            rank, at, least = (self._folder / "strike").read_text().split(",")
            if (int(rank), at) == (self._rank, moment) and iteration >= int(least):
                (self._folder / "struck").touch()
                threading.Event().wait()

    def note(self, what: str, iteration: int) -> None:
        with open(self._folder / f"{what}-{self._rank}", "a") as file:
            file.write(f"{iteration}\n")

    def wait_for_leash(self, iteration: int) -> None:
        while int((self._folder / "leash").read_text()) < iteration:
            time.sleep(POLL_SECONDS)

    def _write(self, iteration: int) -> None:
        self.reach("committing", iteration)
        if iteration >= self._full_from:
            raise OSError(errno.EIO, os.strerror(errno.EIO))


def train(folder: Path, iterations: int, full_from: int) -> None:
    dist.init_process_group("gloo")
    work, moments = RankedWork("ddp"), Moments(folder, full_from)
    moments.watch()
    session = holdfast.Session(
        JOB, model=work.model, optimizer=work.optimizer, loop=holdfast.Variables(), every=EVERY
    )
    session.resume()
    ledger = os.open(folder / f"ledger-{session.rank}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    while session.iteration < iterations:
        moments.wait_for_leash(session.iteration + 1)
        loss = work.iterate()
        place = f"{os.getpid()} {session.attempt} {session.lineage} {session.iteration + 1}"
        os.write(ledger, f"{place} {work.outcome(loss)}\n".encode())
        session.step(loss=loss)
        session.wait()
        time.sleep(STEP_SECONDS)
    session.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    train(Path(sys.argv[1]), *map(int, sys.argv[2:]))
