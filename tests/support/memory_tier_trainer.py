"""A small training job each of whose first starts ends as its options say, at a chosen stage of a checkpoint.

It writes the loss of each step to a ledger, bit for bit.
"""

from __future__ import annotations

import argparse
import os
import signal
import struct
import threading
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import holdfast
from holdfast.save import completion_marker
from holdfast.save.layout import Layout
from holdfast.save.shared_buffers import SharedBuffer, slots_in
from holdfast.store.local import LocalWriter
from tests.support.fault_injection import die, run_after, run_before

FOLDER = Path(os.environ.get("HOLDFAST_SUPERVISION", "."))
ENDS = {"SIGKILL", "exception", "abort", "hang", "scribble"}
"""How a start ends two iterations after its checkpoint, once that is sealed; `hang`: that is not durable."""


def dies_at(stage, trainer):
    """Send SIGKILL at a stage of the first checkpoint from the chosen iteration on."""

    def act(*_):
        if trainer.iteration >= trainer.at:
            die()

    match stage:
        case "unsealing":
            run_before(SharedBuffer, "remove_marker", act)
        case "unmarked":
            run_after(SharedBuffer, "remove_marker", act)
        case "copying":
            run_before(Layout, "copy_host", act)
        case "copied":
            run_before(completion_marker, "write_marker", act)
        case "half sealed":
            run_before(Path, "rename", lambda path, *_: act() if path.name.startswith("slot-") else None)
        case "sealed":
            run_after(completion_marker, "write_marker", act)
        case "committing":
            # the digests are made beside the write: both are over by then
            run_before(LocalWriter, "commit", act)
        case "committed":
            run_after(LocalWriter, "commit", act)


def hang_from(iteration):
    """A disk that no checkpoint from `iteration` on gets to."""

    def hang(writer, *_):
        if int(writer._final.name.partition("-")[0]) >= iteration:
            threading.Event().wait()

    run_before(LocalWriter, "write", hang)


class MemoryTierTrainer:
    def __init__(self, options, at):
        self.at = at
        torch.manual_seed(7)
        torch.set_num_threads(1)
        width = options.width
        self.model = nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.3),
                                   nn.Linear(width, 3))  # fmt: skip
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.session = holdfast.Session(
            "tier", model=self.model, optimizer=self.optimizer, loop=holdfast.Variables(), every=options.every,
        )  # fmt: skip

    @property
    def iteration(self):
        return self.session.iteration

    def iterate(self, ledger):
        points, kinds = torch.randn(16, 8), torch.randint(3, (16,))
        loss = F.cross_entropy(self.model(points), kinds)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        bits = struct.pack("<f", loss.item()).hex()
        line = f"{os.getpid()} {self.session.lineage} {self.session.iteration + 1} {bits} 0\n"
        os.write(ledger, line.encode())
        self.session.step(loss=loss)

    def settle(self):
        """Waits for the checkpoint under way, so that a test knows which iterations have one."""
        self.session.wait(300)

    def wait_sealed(self, iteration):
        held = slots_in(FOLDER)
        while held and not any(
            marker.draft.iteration == iteration for marker in completion_marker.markers_of(FOLDER, "tier")
        ):
            threading.Event().wait(0.005)


def scribble():
    """As a bug of native code might: one bit of what is in memory."""
    for slot in slots_in(FOLDER):
        if slot.marker.exists():
            fd = slot.open()
            found = os.pread(fd, 1, 4096)
            os.pwrite(fd, bytes([found[0] ^ 1]), 4096)
            os.close(fd)


def end_with(words):
    if "scribble" in words:
        scribble()
    if "exception" in words:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    os.kill(os.getpid(), signal.SIGABRT if "abort" in words else signal.SIGKILL)


def starts_so_far(ledger):
    """Number of starts that have trained."""
    return len({line.split()[0] for line in ledger.read_text().splitlines()}) if ledger.exists() else 0


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("ledger")
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--at", type=int, default=15, help="a checkpoint is taken there, and the first start ends")
    parser.add_argument("--apart", type=int, default=10, help="iterations from there to that of the next start")
    parser.add_argument("--ends", nargs="*", default=[], help="of the starts: a stage, or words of ENDS")
    parser.add_argument(
        "--always", action="store_true", help="each start has the first of them, at the same place"
    )
    options = parser.parse_args()
    number = 0 if options.always else starts_so_far(Path(options.ledger))
    end = options.ends[number] if number < len(options.ends) else ""
    at = options.at + number * options.apart
    words = set(end.split()) if set(end.split()) <= ENDS else set()
    if "hang" in words:
        hang_from(at)
    trainer = MemoryTierTrainer(options, at)
    if not words:
        dies_at(end, trainer)
    ledger = os.open(options.ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    trainer.session.resume()
    while trainer.iteration < options.iterations:
        trainer.iterate(ledger)
        if not ("hang" in words and trainer.iteration >= at):
            trainer.settle()
        if words and trainer.iteration == at + 2:
            trainer.wait_sealed(at)
            end_with(words)
    trainer.session.close()


if __name__ == "__main__":
    import tests.support.eager_torch  # noqa: F401  not for several ranks, which import this module

    main()
