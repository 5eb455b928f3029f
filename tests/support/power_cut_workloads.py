"""Workloads for tests of power cuts: kill a writer, cut the disk off, and check what the disk holds."""

from __future__ import annotations

import os
import random
import select
import signal
import socket
import stat
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from tests.support import store_workloads
from tests.support.fork_server import WorkloadChannel
from tests.support.private_mounts import Disk, of_my_own
from tests.support.store_invariants import leftovers, violations

OPTIONS = {"ext4": ("", "data=writeback,commit=1"), "xfs": ("",)}
SIZES = (50_000, 3 << 20)
"""Sizes written through the page cache and with direct I/O."""
SYNCS = ("fsync", "fdatasync")


def cuts(
    stage: WorkloadChannel,
    folder: str,
    kind: str,
    trials: int,
    seed: int,
    after_ack: bool,
    skipping: str | None = None,
) -> None:
    """Run `trials` power cuts one after the other; report each violation."""
    of_my_own()
    stage.ready()
    moments = random.Random(seed)
    for number in range(trials):
        with tempfile.TemporaryDirectory(dir=folder) as place:
            disk = Disk(Path(place), kind, OPTIONS[kind][number % len(OPTIONS[kind])])
            size_bytes = SIZES[number // 2 % len(SIZES)]
            acks = moments.randint(1, 6)
            pause = 0.0 if after_ack else moments.uniform(0.0, 0.06)
            for each in _trial(disk, size_bytes, acks, pause, skipping):
                stage.tell("wrong", f"cut {number} after {acks} acks and {pause:.4f} s, {size_bytes} bytes:", each)
        stage.tell("cut", number)


def _trial(disk: Disk, size_bytes: int, acks: int, pause: float, skipping: str | None) -> list[str]:
    with disk.mounted() as root:
        told = _write_until_cut(disk, root / "store", size_bytes, acks, pause, skipping)
    with disk.mounted() as root:
        found = violations(root / "store", told)
        again: list[str] = []
        if status := _finish(lambda line: store_workloads.train(line, str(root / "store"), saves=1), again):
            return [*found, f"does not start again ({status}): {again}"]
        found += violations(root / "store", [*told, *again])
        if left := leftovers(root / "store"):
            found.append(f"leaves {left} after a restart")
    return found


def _write_until_cut(
    disk: Disk, root: Path, size_bytes: int, acks: int, pause: float, skipping: str | None
) -> list[str]:
    """Return the lines that the writer sent before the cut, `pause` after the last of `acks` acknowledgements."""
    told: list[str] = []

    def write(line: WorkloadChannel) -> None:
        if skipping:
            _skip(skipping)
        # right after an acknowledgement means that nothing follows it which would sync it by chance
        saves = 1_000_000 if pause else acks
        store_workloads.train(line, str(root), saves=saves, size_bytes=size_bytes)
        signal.pause()

    pid, ours = _fork(write)
    ours.sendall(b"go\n")
    while sum(line.startswith("durable ") for line in told) < acks or (not pause and "done" not in told):
        assert _listen(ours, told, 30.0), f"the writer is silent; it sent {told}"
    if pause:
        select.select([], [], [], pause)  # the moment is what is left to chance
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    while _listen(ours, told, 0.0):
        pass
    ours.close()
    disk.cut()
    return told


def _finish(work: Callable[[WorkloadChannel], None], told: list[str]) -> int:
    """Run `work` in a forked process to its end; return the exit status."""
    pid, ours = _fork(work)
    ours.sendall(b"go\n")
    while _listen(ours, told, 30.0):
        pass
    ours.close()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _fork(work: Callable[[WorkloadChannel], None]) -> tuple[int, socket.socket]:
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        _live(work, theirs)
    theirs.close()
    return pid, ours


def _live(work: Callable[[WorkloadChannel], None], line: socket.socket) -> NoReturn:
    try:
        work(WorkloadChannel(line))
    except BaseException:  # do not return into the parent's stack, which the fork has copied
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _listen(line: socket.socket, told: list[str], seconds: float) -> bool:
    """Receive whole lines; return False at the end, or on timeout."""
    if not select.select([line], [], [], seconds)[0] or not (data := line.recv(1 << 16)):
        return False
    told += data.decode().splitlines()  # each was sent whole, and is small
    return True


def _skip(kind: str) -> None:
    """Make this process skip fsync of directories, or of files."""
    skipped = stat.S_ISDIR if kind == "directories" else stat.S_ISREG
    for name in SYNCS:
        real = getattr(os, name)
        setattr(os, name, lambda fd, real=real: None if skipped(os.fstat(fd).st_mode) else real(fd))
