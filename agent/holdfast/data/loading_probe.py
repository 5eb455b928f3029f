"""Measurement of how long loading a batch takes and whether training waits for it.

As in DS-Analyzer (VLDB 2021), the same batches are read twice: the time that the second reading saves, with warm
caches, is fetching; the rest is preparing. Each batch is timed in the worker that reads it, so that the figures do
not depend on the number of workers, on prefetching or on start-up.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch

from holdfast.data.loader import DataLoader
from holdfast.data.order import DatasetWrapper
from holdfast.errors import NoProbe
from holdfast.state.rng import restore_rng, rng_state
from holdfast.system.preemption import iterate_loader
from holdfast.torch_internals import limit_wait
from holdfast.units import duration

BATCHES = 50
WARM_UP_BATCHES = 5
MOST_SECONDS = 10.0

NOTHING_SAVED = 0.03
"""Share of loading below which the saving of a second reading is noise."""
UNEXPLAINED_SECONDS = 0.002
UNEXPLAINED_SHARE = 0.25
"""A wait is unexplained if it exceeds the expected one by more than both."""

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadingTimes:
    """Mean times of loading one batch, in the process that reads it."""

    fetch_seconds: float
    prep_seconds: float
    batches: int
    """Number of batches measured."""
    workers: int

    @property
    def load_seconds(self) -> float:
        return self.fetch_seconds + self.prep_seconds


def probe(
    loader: object, batches: int = BATCHES, most_seconds: float = MOST_SECONDS, clock: Clock = time.perf_counter
) -> LoadingTimes:
    """Read the next batches of a loader twice, after those that its workers have read ahead.

    They are read by separate workers: the loader, its workers, its position and all random states stay as they
        are, and the loader still gives every batch. Without workers they are read in this process, and the last
        batch may exceed the time limit.

    Raises:
        NoProbe: this loader cannot be read twice, or not within the time, or reading fails; says why.
    """
    if not isinstance(loader, DataLoader):
        raise NoProbe(
            f"{type(loader).__name__} cannot be read ahead of training. Use holdfast.DataLoader, which takes the "
            "same arguments"
        )
    workers, state = loader.num_workers, rng_state()
    first = max(WARM_UP_BATCHES, workers * (loader.prefetch_factor or 0))
    try:
        began = clock()
        reading = loader.second_loader(
            batches + first, lambda dataset: _TimedDataset(dataset, clock), most_seconds
        )
        if reading is None:
            raise NoProbe(
                f"{type(loader.dataset).__name__} is iterable and can be read only once. Only map-style datasets "
                "can be measured"
            )
        cold = _read(reading, batches + first, began + most_seconds / 2, clock)
        warm = _read(reading, len(cold), began + most_seconds, clock) if cold else []
    finally:
        restore_rng(state)
    if not warm:
        raise NoProbe(_why_nothing(reading, cold, most_seconds))
    return _split_times(cold[: len(warm)], warm, first, workers)


def _split_times(cold: Sequence[float], warm: Sequence[float], first: int, workers: int) -> LoadingTimes:
    # the first batches include the start of the workers, and compete with the loader's own prefetching
    first = min(first, len(cold) // 2)
    whole = fmean(cold[first:])
    prep = min(fmean(warm[first:]), whole)
    return LoadingTimes(fetch_seconds=whole - prep, prep_seconds=prep, batches=len(cold) - first, workers=workers)


def _read(reading: torch.utils.data.DataLoader[Any], most: int, until: float, clock: Clock) -> list[float]:
    """Return the seconds that each of the first batches took, until the time is up."""
    taken: list[float] = []
    source: Any = iterate_loader(reading)
    while len(taken) < most and (left := until - clock()) > 0:
        limit_wait(source, left if reading.num_workers else 0)  # torch's limit is per batch, this one is for all
        try:
            seconds = next(source, None)
        except RuntimeError:  # torch raises it on a timeout
            if clock() < until:
                raise
            break
        if seconds is None:
            break
        if isinstance(seconds, str):
            raise NoProbe(f"reading the next batches raised {seconds}")
        taken.append(seconds)
    return taken


def _why_nothing(reading: torch.utils.data.DataLoader[Any], cold: Sequence[float], most_seconds: float) -> str:
    if cold:
        return (
            f"a batch takes about {fmean(cold):.3g} s to load, too long to read batches twice in {most_seconds:g} "
            "s"
        )
    if len(reading) == 0:
        return (
            "only the sampler knows the next batches, and it cannot be read ahead: repeat the request at the "
            "beginning of an epoch, or give the sampler a len()"
        )
    return f"no batch was loaded within {most_seconds / 2:g} s"


class _TimedDataset(DatasetWrapper):
    """Gives the reading time in place of each batch: the batches of two loaders may not fit into shared memory."""

    def __init__(self, dataset: Any, clock: Clock) -> None:
        super().__init__(dataset, _clock=clock)

    def __getitem__(self, key: Any) -> float | str:
        return self._timed(self._dataset.__getitem__, key)

    def __getitems__(self, keys: list[Any]) -> float | str:
        return self._timed(self._dataset.__getitems__, keys)

    def _timed(self, read: Callable[[Any], object], key: Any) -> float | str:
        began = self._clock()
        try:
            read(key)
        except Exception as error:  # returned: after a worker raises, torch waits for seconds
            return f"{type(error).__name__}: {error}"
        return float(self._clock() - began)


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationTimes:
    """Times of recent iterations."""

    compute_seconds: float
    """Median without waits for data and for checkpoints, so that an evaluation does not count."""
    wait_seconds: float
    """Mean wait for data: with several workers, only some iterations wait."""
    iterations: int
    """Number of iterations."""
    batches: float = 1.0
    """Batches per iteration."""


def describe_loading(probed: LoadingTimes, pace: IterationTimes | None, processors: int | None = None) -> str:
    """Describe the result. Without `pace`, only loading is described."""
    sentences = [_loading(probed)]
    if pace is not None:
        sentences += _waiting(probed, pace, processors or _processors())
    return ". ".join(sentences)


def expected_wait_seconds(probed: LoadingTimes, pace: IterationTimes) -> float:
    """Return the expected wait of an iteration: the time to load its batches minus the overlapping computation."""
    if probed.workers == 0:  # the loop itself reads
        return probed.load_seconds * pace.batches
    return max(0.0, probed.load_seconds * pace.batches / probed.workers - pace.compute_seconds)


def _loading(probed: LoadingTimes) -> str:
    load, fetch, prep = (
        duration(probed.load_seconds),
        duration(probed.fetch_seconds),
        duration(probed.prep_seconds),
    )
    each, ready = "", ""
    if probed.workers > 1:
        each = f" in each of {probed.workers} workers"
        ready = f", so that one is ready every {duration(probed.load_seconds / probed.workers)}"
    text = f"a batch takes {load} to load{each}: {fetch} fetching and {prep} preparing{ready}"
    text += f" (over {probed.batches} batches)"
    if probed.fetch_seconds > NOTHING_SAVED * probed.load_seconds:
        return text
    return f"{text}. A second read was not faster: the data is already cached, or cannot be cached"


def _waiting(probed: LoadingTimes, pace: IterationTimes, processors: int) -> list[str]:
    expected = expected_wait_seconds(probed, pace)
    drawn = "" if pace.batches < 1.01 else f" over {pace.batches:.3g} batches"
    computes = f"An iteration computes for {duration(pace.compute_seconds)}{drawn}"
    waited = f"the last {pace.iterations} waited {duration(pace.wait_seconds)} each"
    if expected:
        why = "" if probed.workers else ", since without workers nothing is loaded while it computes"
        sentences = [f"{computes} and should wait {duration(expected)} for data{why}; {waited}"]
        sentences.append(_remedies(probed, pace, processors))
    else:
        sentences = [f"{computes}, and loading keeps up; {waited}"]
    if pace.wait_seconds > expected + max(UNEXPLAINED_SECONDS, UNEXPLAINED_SHARE * expected):
        sentences.append(
            "That is more than loading explains. Other causes: transfer of batches between processes, starting "
            "workers in every epoch (persistent_workers=True avoids it), or processors shared with training"
        )
    return sentences


def _remedies(probed: LoadingTimes, pace: IterationTimes, processors: int) -> str:
    """Describe what would end the wait; if no single remedy would, the larger part of it."""
    found = []
    compute, workers = pace.compute_seconds, probed.workers
    fetch, prep = probed.fetch_seconds * pace.batches, probed.prep_seconds * pace.batches
    # preparing needs a processor, waiting for a disk does not
    if prep <= processors * compute and compute > 0:
        enough = f"num_workers={max(1, math.ceil((fetch + prep) / compute))}"
        found.append(f"{enough}, if the disk is fast enough" if fetch > prep else enough)
    if workers and prep <= workers * compute:
        found.append("a faster disk or a cache")
    if workers and fetch <= workers * compute:
        found.append("cheaper preparation")
    if found:
        return f"Remedies: {'; or '.join(found)}"
    if fetch > prep:
        return "The larger part is fetching: a faster disk or a cache helps most"
    return (
        f"The larger part is preparing, for which {processors} processors are too few: cheaper preparation helps "
        "most"
    )


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
