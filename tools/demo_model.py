"""Choose the demo's model so that an iteration takes about 0.1 s under the present load of this machine.

Prints options for examples/char_gpt.py, and the measured milliseconds per iteration on standard error.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path

import torch
from torch.nn import functional as F  # noqa: N812

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from char_gpt import BYTES, CONTEXT, GPT

SIZES = ((128, 2), (192, 3), (256, 4), (384, 5))
"""Width and layers, smallest first; each takes two to three times as long as the one before."""
TARGET_SECONDS = 0.09
BATCH_SIZE, MOST = 4, 64
ROUNDS = 5


def choose_threads(cores: int, load: float) -> int:
    """Return half of the cores, or one on a busy machine, where threads would wait for each other."""
    return 1 if load > cores / 2 else max(1, cores // 2)


def choose_model(iteration_seconds: dict[tuple[int, int], float]) -> tuple[int, int, int]:
    """Return width, layers and batch size for `TARGET_SECONDS`, from the time of each size with `BATCH_SIZE`."""
    fitting = [size for size in SIZES if iteration_seconds.get(size, float("inf")) <= TARGET_SECONDS]
    width, layers = fitting[-1] if fitting else SIZES[0]
    batch_size = round(BATCH_SIZE * TARGET_SECONDS / iteration_seconds[width, layers])
    return width, layers, min(max(batch_size, 1), MOST)


def measure_iteration(width: int, layers: int) -> float:
    """Return the median seconds of an iteration, without the first, which allocates memory."""
    model = GPT(width, layers)
    optimizer = torch.optim.AdamW(model.parameters())
    text = torch.randint(BYTES, (BATCH_SIZE, CONTEXT + 1))
    seconds = []
    for _ in range(1 + ROUNDS):
        started = time.perf_counter()
        logits = model(text[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


def main() -> None:
    threads = choose_threads(len(os.sched_getaffinity(0)), os.getloadavg()[0])
    torch.set_num_threads(threads)
    measured: dict[tuple[int, int], float] = {}
    for size in SIZES:
        measured[size] = measure_iteration(*size)
        if measured[size] > TARGET_SECONDS:
            break
    width, layers, batch_size = choose_model(measured)
    print(f"--width {width} --layers {layers} --batch-size {batch_size} --threads {threads}")
    timings = ", ".join(f"width {size[0]}: {seconds * 1000:.0f} ms" for size, seconds in measured.items())
    print(f"an iteration of {BATCH_SIZE} samples on {threads} threads: {timings}", file=sys.stderr)


if __name__ == "__main__":
    main()
