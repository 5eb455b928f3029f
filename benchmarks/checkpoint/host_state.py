"""Host state without a second copy: a NumPy array of which one row is written an iteration, copied and forked.

Each mode trains in a process of its own, `python -m benchmarks.checkpoint.host_state MODE GB FOLDER`, which prints
what one session cost as JSON. Memory is the proportional share (PSS) of the process and its child.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

CHECKPOINTS = 4
WARM_UP = 1
"""Checkpoints before the measured ones: the first that is copied waits for its memory."""
IDLE_ITERATIONS = 50
ROW_BYTES = 4096
MODES = ("copy", "fork")
SAMPLE_SECONDS = 0.1


def report(state_gb: float, folder: Path) -> None:
    """Measure both modes, and print a table and the figures."""
    found = {}
    for mode in MODES:
        command = [sys.executable, "-m", "benchmarks.checkpoint.host_state", mode, str(state_gb)]
        output = subprocess.run([*command, str(folder / mode)], check=True, capture_output=True, text=True)
        found[mode] = each = json.loads(output.stdout.splitlines()[-1])
        print(
            f"{mode}: blocked {each['blocked_seconds'] * 1e3:,.0f} ms a checkpoint, memory "
            f"{each['memory_factor']:.2f} x the array, durable in {each['durable_seconds']:.1f} s; an iteration "
            f"{each['iteration_seconds'] * 1e3:.1f} ms, {each['writing_seconds'] * 1e3:.1f} ms meanwhile",
            flush=True,
        )
    copy, fork = found["copy"], found["fork"]
    figures = {
        "state_gb": state_gb,
        "fork_memory_factor": round(fork["memory_factor"], 3),
        "copy_memory_factor": round(copy["memory_factor"], 3),
        "blocked_ratio": round(fork["blocked_seconds"] / copy["blocked_seconds"], 3),
    }
    print(f"figures: {json.dumps(figures)}")


def measure(mode: str, state_gb: float, folder: str) -> dict[str, float]:
    """Train in this process; return medians of what checkpoints cost."""
    import numpy as np
    import psutil
    import torch

    import holdfast

    process = psutil.Process()
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
        started = time.perf_counter()
        session.step()
        return time.perf_counter() - started

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
        before = process.memory_full_info().pss
        state.buffer = np.full((max(1, round(state_gb * 1e9 / ROW_BYTES)), ROW_BYTES // 8), 1.5)
        idle, idle_step = _timed(iterate, IDLE_ITERATIONS)
        with _peak_memory(process) as peak:
            for number in range(WARM_UP + CHECKPOINTS):
                session.checkpoint()
                seconds, began = iterate(), time.perf_counter()
                slow = []
                while not (outcomes := _ended(session)):
                    started = time.perf_counter()
                    iterate()
                    slow.append(time.perf_counter() - started)
                assert all(outcome.is_durable for outcome in outcomes), outcomes
                if number >= WARM_UP:
                    blocked.append(seconds - idle_step)
                    durable.append(time.perf_counter() - began)
                    writing += slow
    return {
        "blocked_seconds": statistics.median(blocked),
        "memory_factor": (peak[0] - before) / state.buffer.nbytes,
        "iteration_seconds": idle,
        "writing_seconds": statistics.median(writing),
        "durable_seconds": statistics.median(durable),
    }


def _timed(iterate, count):
    """Return the medians of an iteration, and of its step of the session."""
    wholes, steps = [], []
    for _ in range(count):
        started = time.perf_counter()
        steps.append(iterate())
        wholes.append(time.perf_counter() - started)
    return statistics.median(wholes), statistics.median(steps)


def _ended(session):
    with contextlib.suppress(TimeoutError):
        return session.wait(0)
    return []


@contextlib.contextmanager
def _peak_memory(process):
    """Sample the memory of a process and its children; yield a list whose item is the peak in bytes."""
    peak, ended = [0], threading.Event()

    def watch():
        import psutil

        while not ended.wait(SAMPLE_SECONDS):
            total = 0
            for each in (process, *process.children()):
                with contextlib.suppress(psutil.Error):  # it has just ended
                    total += each.memory_full_info().pss
            peak[0] = max(peak[0], total)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        ended.set()
        thread.join()


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], float(sys.argv[2]), sys.argv[3])))
