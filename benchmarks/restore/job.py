"""The trainer that is killed, restored and restarted; it prints timed events as lines of JSON.

`python -m benchmarks.restore.job ROLE`; times are of the machine's monotonic clock, which all processes share.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from benchmarks import disk
from benchmarks.harness import record_calls, run, seconds_of

WIDTH = 1024
STATE_BYTES = 12
"""State per parameter: itself and AdamW's two moments, in float32."""
JOB = "bench"


def say(what: str, **more: object) -> None:
    print(json.dumps({"what": what, "at": time.monotonic(), "pid": os.getpid(), **more}), flush=True)


class SizedTraining:
    """Square layers with a given size of state."""

    def __init__(self, size_bytes: int) -> None:
        torch.manual_seed(0)
        layers = max(1, round(size_bytes / STATE_BYTES / (WIDTH * WIDTH + WIDTH)))
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def iterate(self) -> None:
        loss = self.model(torch.randn(8, WIDTH)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def bare(size_bytes: int) -> None:
    """Without Holdfast: start, and one iteration."""
    SizedTraining(size_bytes).iterate()
    say("iteration", iteration=1)


def supervised(size_bytes: int) -> None:
    """The first start is killed after a checkpoint, the second ends after one iteration."""
    training, session = _with_holdfast(size_bytes, every=2)
    resumed = session.resume()
    while True:
        training.iterate()
        session.step()
        say("iteration", iteration=session.iteration, resumed=resumed)
        if resumed:
            os._exit(0)
        session.wait(600)  # else the next one is delayed, and is not that of iteration 4
        if session.iteration == 4:
            say("ready")
            signal.pause()


def in_place(size_bytes: int, rounds: int, store: Path) -> None:
    """Restore iteration 2, with a raw read and copy of the same file each time."""
    training, session = _with_holdfast(size_bytes, every=2)
    session.resume()
    while session.iteration < 3:
        training.iterate()
        session.step()
        session.wait(600)
    session.every(10**9)
    (file,) = (store / JOB).glob("000000000002-*/rank-0.safetensors")
    target, other = (disk.touched(file.stat().st_size) for _ in range(2))
    safety_seconds = record_calls(session._boundary.in_place_restore, "_take_safety")
    restore_seconds = record_calls(session._boundary.in_place_restore, "restore")
    for _ in range(rounds):
        read, copied = disk.read_uncached(file, target), seconds_of(lambda: disk.copy(other, target))
        disk.forget_cached(file)
        disk.touched(len(target)).close()  # a virtual machine must request idle memory from its host
        session.restore(2)
        training.iterate()
        session.step()
        assert session.iteration == 2
        say("restored", raw_read=read, raw_copy=copied, whole=restore_seconds.pop(), safety=safety_seconds.pop())
    os._exit(0)


def ordered(size_bytes: int, iteration_seconds: float) -> None:
    """Train with iterations of a given duration until terminated."""
    training, session = _with_holdfast(size_bytes, every=20)
    session.resume()
    while True:
        began = time.perf_counter()
        training.iterate()
        time.sleep(max(0.0, iteration_seconds - (time.perf_counter() - began)))
        session.step()
        say("iteration", iteration=session.iteration)


def seed(size_bytes: int) -> None:
    """Leave a durable checkpoint, complete in the memory tier if there is one, and exit."""
    training, session = _with_holdfast(size_bytes, every=1)
    session.resume()
    training.iterate()
    session.step()
    session.wait(600)
    os.kill(os.getpid(), signal.SIGKILL)


def resume(size_bytes: int, cold: Path) -> None:
    """Resume from the newest checkpoint."""
    _, session = _with_holdfast(size_bytes, every=10**9)
    load = record_calls(session._training, "load")
    from_memory = record_calls(session._memory, "load") if session._memory is not None else []
    disk.forget_cached(cold)
    began = time.perf_counter()
    assert session.resume() == 1
    whole = time.perf_counter() - began
    say("resumed", whole=whole, load=sum(load + from_memory), memory=bool(from_memory))
    os._exit(0)


def _with_holdfast(size_bytes: int, *, every: int) -> tuple[SizedTraining, Any]:
    import holdfast

    training = SizedTraining(size_bytes)
    session = holdfast.Session(
        JOB, model=training.model, optimizer=training.optimizer, loop=holdfast.Variables(), every=every, keep=2
    )
    return training, session


def main(
    role: Literal["bare", "supervised", "in_place", "ordered", "seed", "resume"],
    megabytes: float = 500,
    rounds: int = 1,
    store: Path = Path(),
    iteration_seconds: float = 0.05,
) -> None:
    size_bytes = int(megabytes * 1e6)
    match role:
        case "in_place":
            in_place(size_bytes, rounds, store)
        case "ordered":
            ordered(size_bytes, iteration_seconds)
        case "resume":
            resume(size_bytes, store)
        case _:
            {"bare": bare, "supervised": supervised, "seed": seed}[role](size_bytes)


if __name__ == "__main__":
    run(main, is_helper=True)
