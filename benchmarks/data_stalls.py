"""`python -m benchmarks.data_stalls`: whether `holdfast probe` finds what a dataset takes to fetch and to prepare.

A sample sleeps for fetching at its first read, and for preparing at every read. Figures: the largest error, in
milliseconds a batch, and the largest difference of the expected wait of an iteration from the measured one.
"""

from __future__ import annotations

import itertools
import time
from statistics import fmean
from typing import Any

import torch
from torch.utils.data import Dataset

import holdfast
from benchmarks.harness import Table, run, seconds_of
from holdfast.data.loading_probe import IterationTimes, LoadingTimes, expected_wait_seconds, probe

BATCH, BATCHES, SAMPLES = 4, 40, 800
COMPUTE_SECONDS = 0.02
TIMES = (0.005, 0.05), (0.02, 0.02), (0.05, 0.005)
"""Seconds of fetching and preparing a batch."""
WORKERS = 0, 1, 2, 4
COLUMNS = ("fetching", "as probed", "preparing", "as probed ", "expected wait", "measured")


class SlowDataset(Dataset[Any]):
    def __init__(self, fetch: float, prep: float) -> None:
        self.fetch, self.prep = fetch / BATCH, prep / BATCH
        self.is_read = torch.zeros(SAMPLES, dtype=torch.bool).share_memory_()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        time.sleep(self.prep if self.is_read[index] else self.fetch + self.prep)
        self.is_read[index] = True
        return index


def main() -> dict[str, float]:
    errors, differences = list[float](), list[float]()
    print("ms of a batch, and of the wait of an iteration", flush=True)
    table = Table({"workers": "d"} | dict.fromkeys(COLUMNS, ".1f"))
    for workers, (fetch, prep) in itertools.product(WORKERS, TIMES):

        def loader(workers: int = workers, fetch: float = fetch, prep: float = prep) -> holdfast.DataLoader:
            return holdfast.DataLoader(SlowDataset(fetch, prep), batch_size=BATCH, num_workers=workers, seed=1)

        waited, found = _waits(loader()), probe(loader())
        expected = _expected(found, waited)
        errors += [abs(found.fetch_seconds - fetch), abs(found.prep_seconds - prep)]
        differences.append(abs(expected - waited))
        cells = (fetch, found.fetch_seconds, prep, found.prep_seconds, expected, waited)
        table.row(workers, *(1e3 * cell for cell in cells))
    return {"probe_error_ms": 1e3 * max(errors), "expected_wait_error_ms": 1e3 * max(differences)}


def _waits(loader: holdfast.DataLoader) -> float:
    """Return the mean wait of an iteration that computes for some time."""
    waits, batches = [], iter(loader)
    for _ in range(BATCHES):
        waits.append(seconds_of(lambda: next(batches)))
        time.sleep(COMPUTE_SECONDS)
    return fmean(waits[BATCHES // 4 :])


def _expected(found: LoadingTimes, waited: float) -> float:
    pace = IterationTimes(compute_seconds=COMPUTE_SECONDS, wait_seconds=waited, iterations=BATCHES)
    return expected_wait_seconds(found, pace)


if __name__ == "__main__":
    run(main)
