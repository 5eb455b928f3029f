"""Host state without a second copy: a NumPy array of which one row is written an iteration, copied and forked.

Each mode trains in a process of its own, `python -m benchmarks.checkpoint.host_state MODE GB FOLDER`, which prints
what one session cost as JSON. Memory is the proportional share (PSS) of the process and its child.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from pathlib import Path

from benchmarks.harness import cost_of, memory_bytes, output_of, peak_memory, run, seconds_of

CHECKPOINTS = 4
WARM_UP = 1
"""Checkpoints before the measured ones: the first that is copied waits for its memory."""
IDLE_ITERATIONS = 50
ROW_BYTES = 4096
MODES = ("copy", "fork")
SAMPLE_SECONDS = 0.1
PSS = ("Pss:",)


def report(state_gb: float, folder: Path) -> dict[str, float]:
    """Measure both modes, print a table, and return the figures."""
    found = {}
    for mode in MODES:
        module, place = "benchmarks.checkpoint.host_state", folder / mode
        found[mode] = each = output_of(module, mode, state_gb, place)
        print(
            f"{mode}: blocked {each['blocked_seconds'] * 1e3:,.0f} ms a checkpoint, memory "
            f"{each['memory_factor']:.2f} x the array, durable in {each['durable_seconds']:.1f} s; an iteration "
            f"{each['iteration_seconds'] * 1e3:.1f} ms, {each['writing_seconds'] * 1e3:.1f} ms meanwhile",
            flush=True,
        )
    copy, fork = found["copy"], found["fork"]
    return {
        "state_gb": state_gb,
        "fork_memory_factor": fork["memory_factor"],
        "copy_memory_factor": copy["memory_factor"],
        "blocked_ratio": fork["blocked_seconds"] / copy["blocked_seconds"],
    }


def measure(mode: str, state_gb: float, folder: Path) -> dict[str, float]:
    """Train in this process; return medians of what checkpoints cost."""
    import numpy as np
    import torch

    import holdfast

    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    state = holdfast.Variables(buffer=None)
    row = 0

    def iterate() -> float:
        nonlocal row
        optimizer.zero_grad()
        model(torch.ones(32, 64)).square().mean().backward()
        optimizer.step()
        if state.buffer is not None:
            state.buffer[row % len(state.buffer)] = row
            row += 1
        return seconds_of(session.step)

    blocked, durable, writing = list[float](), list[float](), list[float]()
    session = holdfast.Session(
        "host-state", store=folder, every=10**6, keep=1, host_state=mode, model=model, optimizer=optimizer,
        variables=state,
    )  # fmt: skip
    with session:
        session.resume()
        session.checkpoint()
        iterate()
        session.wait()
        before = memory_bytes(os.getpid(), PSS)
        state.buffer = np.full((max(1, round(state_gb * 1e9 / ROW_BYTES)), ROW_BYTES // 8), 1.5)
        whole, idle_step = zip(*(cost_of(iterate)[::2] for _ in range(IDLE_ITERATIONS)), strict=True)
        with peak_memory(os.getpid(), PSS, SAMPLE_SECONDS) as peak:
            for number in range(WARM_UP + CHECKPOINTS):
                session.checkpoint()
                seconds, began = iterate(), time.perf_counter()
                slow = []
                while not (outcomes := _ended(session)):
                    slow.append(seconds_of(iterate))
                assert all(outcome.is_durable for outcome in outcomes), outcomes
                if number >= WARM_UP:
                    blocked.append(seconds - statistics.median(idle_step))
                    durable.append(time.perf_counter() - began)
                    writing += slow
    return {
        "blocked_seconds": statistics.median(blocked),
        "memory_factor": (peak.bytes - before) / state.buffer.nbytes,
        "iteration_seconds": statistics.median(whole),
        "writing_seconds": statistics.median(writing),
        "durable_seconds": statistics.median(durable),
    }


def _ended(session):
    with contextlib.suppress(TimeoutError):
        return session.wait(0)
    return []


if __name__ == "__main__":
    run(measure, is_helper=True)
