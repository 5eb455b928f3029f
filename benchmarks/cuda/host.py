"""Stage `host`: an array of the host is written from forks of a process whose device is initialized."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from torch import nn

import holdfast
from holdfast.checkpoint import restore
from holdfast.format.manifest import digest_tensor
from holdfast.save.run import SETTLED, Run, RunState
from holdfast.store import open_store
from holdfast.system.host_memory import bytes_of

from .stages import CaseResult, Cases, Context

NUMBERS, SMALL_NUMBERS = 128 << 20, 2 << 20
"""Of an array in float64: 1 GB, or 16 MB."""
ITERATIONS = 4
DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/accel")


class ForkWatcher:
    """Follows the runs of a session; looks at the open files of each forked child."""

    def __init__(self) -> None:
        self.durable: list[Run] = []
        self.forks = 0
        self.devices: set[str] = set()

    def run_changed(self, run: Run, state: RunState) -> None:
        if state is RunState.DURABLE:
            self.durable.append(run)
        if run.image is not None and state is RunState.WRITING:
            self.forks += 1
        if run.image is not None and state not in SETTLED:
            self.look(run.image.child.pid)

    def look(self, child: int) -> None:
        """Note the device files that a child has open. It closes all it inherits before it reads memory."""
        try:
            found = [str(each.readlink()) for each in Path(f"/proc/{child}/fd").iterdir()]
        except OSError:  # it ended
            return
        self.devices.update(each for each in found if each.startswith(DEVICES))


def forked(context: Context) -> CaseResult:
    """Change the array and the model right after each checkpoint began; compare what was stored."""
    torch.manual_seed(0)
    model = nn.Linear(256, 256).to(context.device)
    optimizer = torch.optim.AdamW(model.parameters())
    array = np.random.default_rng(0).random(SMALL_NUMBERS if context.small else NUMBERS)
    buffer = holdfast.Variables(array=array)
    expected: dict[int, str] = {}
    watcher = ForkWatcher()
    store = context.folder / "host"
    session = holdfast.Session(
        "host", store=store, server="", every=1, keep=1000, model=model, optimizer=optimizer, buffer=buffer,
        host_state="fork",
    )  # fmt: skip
    session.observe(watcher)
    with session:
        for number in range(ITERATIONS):
            model(torch.ones(8, 256, device=context.device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            array[number :: ITERATIONS * 512] += 1.0
            expected[session.iteration + 1] = digest_tensor(bytes_of(torch.from_numpy(array)))[0]
            session.step()
            array[1::512] -= 0.5  # while the child writes
            session.wait(60)
        after = float(model(torch.ones(8, 256, device=context.device)).sum())
    wrong = [
        run.draft.iteration
        for run in watcher.durable
        if run.draft.iteration in expected and _stored(store, run) != expected[run.draft.iteration]
    ]
    is_met = not wrong and watcher.forks >= ITERATIONS and not watcher.devices and math.isfinite(after)
    values = {"array_mb": array.nbytes / 1e6, "durable": len(watcher.durable), "forks": watcher.forks,
              "wrong": len(wrong), "devices_open_in_children": len(watcher.devices)}  # fmt: skip
    return CaseResult(values, is_met, f"wrong checkpoints of iterations {wrong}" if wrong else "")


def _stored(store: Path, run: Run) -> str | None:
    manifest = restore.verify(open_store(store), "host", run.id)
    return max(manifest.tensors, key=lambda each: each.end - each.start).digest


CASES: Cases = {"array": forked}
