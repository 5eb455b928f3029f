"""`python -m benchmarks.ingest.memory FILE`: how fast the memory of a server grows, with the error of the slope.

`python -m benchmarks.ingest.capacity --memory FILE` writes the samples while agents report.
"""

from __future__ import annotations

import csv
import itertools
import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness import run

SAMPLE_SECONDS = 10.0
BLOCKS = 12
"""Samples in sequence are alike, which would make the error too small: the line goes through means of blocks."""


class MemorySample(NamedTuple):
    hours: float
    megabytes: float


class Slope(NamedTuple):
    megabytes_per_hour: float
    error: float
    """The standard error of the slope."""


def append_sample(file: Path, began: float, pss_bytes: int) -> None:
    with file.open("a") as rows:
        rows.write(f"{time.monotonic() - began:.1f},{pss_bytes}\n")


def read_samples(file: Path) -> list[MemorySample]:
    with file.open() as rows:
        return [MemorySample(float(seconds) / 3600, int(size) / 1e6) for seconds, size in csv.reader(rows)]


def slope(samples: Sequence[MemorySample], blocks: int = BLOCKS) -> Slope:
    """Fit a line by least squares to the means of blocks of samples.

    Raises:
        ValueError: there are fewer samples than blocks.
    """
    if len(samples) < blocks:
        raise ValueError(f"{len(samples)} samples; a slope needs at least {blocks}")
    edges = [number * len(samples) // blocks for number in range(blocks + 1)]
    parts = [samples[start:end] for start, end in itertools.pairwise(edges)]
    hours = [statistics.fmean(sample.hours for sample in part) for part in parts]
    sizes = [statistics.fmean(sample.megabytes for sample in part) for part in parts]
    fitted = statistics.linear_regression(hours, sizes)
    rest = sum((size - fitted.intercept - fitted.slope * at) ** 2 for at, size in zip(hours, sizes, strict=True))
    middle = statistics.fmean(hours)
    spread = sum((at - middle) ** 2 for at in hours)
    return Slope(fitted.slope, math.sqrt(rest / (blocks - 2) / spread))


def main(file: Path, skip: float = 0.5) -> None:
    """Print the slope of the memory.

    Args:
        skip: hours at the start, while caches fill
    """
    samples = read_samples(file)
    late = [sample for sample in samples if sample.hours >= skip]
    found = slope(late)
    print(f"memory    {samples[0].megabytes:.0f} MB at first, {samples[-1].megabytes:.0f} MB at the end")
    print(f"slope     {found.megabytes_per_hour:+.2f} ± {found.error:.2f} MB an hour", end="")
    print(f" from {skip:g} h to {samples[-1].hours:.2f} h, {len(late)} samples in {BLOCKS} blocks")


if __name__ == "__main__":
    run(main, is_helper=True)
