"""How long loading a batch takes and whether training waits for it, found by reading the same batches twice.

After DS-Analyzer (VLDB 2021): what a second reading saves, with caches warm, was fetching; what is left is
preparing. Each batch is timed where it is read, in the worker, so that the figures do not depend on how many
workers there are, on how far they read ahead, or on how long they take to start.
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
from torch.utils.data import Dataset

from holdfast.data.loader import DataLoader
from holdfast.errors import NoProbe
from holdfast.state.rng import restore_rng, rng_state
from holdfast.system.preemption import begun
from holdfast.torch_internals import limit_wait

BATCHES = 50
WARM_UP_BATCHES = 5
MOST_SECONDS = 10.0

NOTHING_SAVED = 0.03
"""Below this share of loading, what a second reading saves is noise."""
UNEXPLAINED_SECONDS = 0.002
UNEXPLAINED_SHARE = 0.25
"""A wait is longer than loading explains when it exceeds that by both."""

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """Of one batch, in the process that reads it."""

    fetch_seconds: float
    prep_seconds: float
    batches: int
    """Over how many these are means."""
    workers: int

    @property
    def load_seconds(self) -> float:
        return self.fetch_seconds + self.prep_seconds


def probe(
    loader: object, batches: int = BATCHES, most_seconds: float = MOST_SECONDS, clock: Clock = time.perf_counter
) -> Probed:
    """Read the next batches of a loader twice, beyond those that its workers have read ahead.

    They are read through workers of its own: the loader, its workers, its position and all random numbers stay as
    they are, and every batch still comes in its turn. Without workers they are read in this process, as the loader
    itself would, and one batch more than the time allows may be.

    Raises:
        NoProbe: this loader cannot be read twice, or not within the time, or reading it fails; says why.
    """
    if not isinstance(loader, DataLoader):
        raise NoProbe(
            f"{type(loader).__name__} cannot be read ahead of training: what data take to load can be told of a "
            "holdfast.DataLoader, which takes the same arguments"
        )
    workers, state = loader.num_workers, rng_state()
    first = max(WARM_UP_BATCHES, workers * (loader.prefetch_factor or 0))
    try:
        began = clock()
        reading = loader.second_loader(batches + first, lambda dataset: _Timed(dataset, clock), most_seconds)
        if reading is None:
            raise NoProbe(
                f"{type(loader.dataset).__name__} is iterable, and what it gives can be read only once: what "
                "data take to load can be told of a dataset whose samples have an index"
            )
        cold = _read(reading, batches + first, began + most_seconds / 2, clock)
        warm = _read(reading, len(cold), began + most_seconds, clock) if cold else []
    finally:
        restore_rng(state)
    if not warm:
        raise NoProbe(_why_nothing(reading, cold, most_seconds))
    return _told_apart(cold[: len(warm)], warm, first, workers)


def _told_apart(cold: Sequence[float], warm: Sequence[float], first: int, workers: int) -> Probed:
    # the first batches pay for the start of the workers, and for the loader's own that still fill up
    first = min(first, len(cold) // 2)
    whole = fmean(cold[first:])
    prep = min(fmean(warm[first:]), whole)
    return Probed(fetch_seconds=whole - prep, prep_seconds=prep, batches=len(cold) - first, workers=workers)


def _read(reading: torch.utils.data.DataLoader[Any], most: int, until: float, clock: Clock) -> list[float]:
    """What each of the first batches took, of as many as are read by then."""
    taken: list[float] = []
    source: Any = begun(reading)
    while len(taken) < most and (left := until - clock()) > 0:
        limit_wait(source, left if reading.num_workers else 0)  # torch's own is for each batch, this one for all
        try:
            seconds = next(source, None)
        except RuntimeError:  # torch says by no other that its time is up
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
        return f"a batch takes about {fmean(cold):.3g} s to load, too long to read any twice in {most_seconds:g} s"
    if len(reading) == 0:
        return (
            "which batches come next is known to the loader's sampler alone, which cannot be asked ahead of its "
            "time: ask again at the beginning of an epoch, or give the sampler a len()"
        )
    return f"not one batch was loaded within {most_seconds / 2:g} s"


class _Timed(Dataset[Any]):
    """Gives in a batch's place what reading it took: two loaders' batches could be too many for shared memory.

    A worker_init_fn finds the script's dataset behind it, as it does with the loader itself.
    """

    def __init__(self, dataset: Any, clock: Clock) -> None:
        self.__dict__.update(_dataset=dataset, _clock=clock)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked for while it is unpickled, before there is a dataset
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)

    def __getitem__(self, key: Any) -> float | str:
        return self._timed(self._dataset.__getitem__, key)

    def __getitems__(self, keys: list[Any]) -> float | str:
        return self._timed(self._dataset.__getitems__, keys)

    def _timed(self, read: Callable[[Any], object], key: Any) -> float | str:
        began = self._clock()
        try:
            read(key)
        except Exception as error:  # told as it is: for a worker that raises, torch waits seconds at the end
            return f"{type(error).__name__}: {error}"
        return float(self._clock() - began)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What an iteration took of late."""

    compute_seconds: float
    """Without its waits for data and for checkpoints; a median: an evaluation is no computing."""
    wait_seconds: float
    """For data, as measured in the loop; a mean, since with several workers only every so many iterations wait."""
    iterations: int
    """Over how many."""
    batches: float = 1.0
    """That it draws."""


def told(probed: Probed, pace: Pace | None, processors: int | None = None) -> str:
    """In words. Without a pace it is not known how long an iteration computes, only what loading takes."""
    sentences = [_loading(probed)]
    if pace is not None:
        sentences += _waiting(probed, pace, processors or _processors())
    return ". ".join(sentences)


def expected_wait_seconds(probed: Probed, pace: Pace) -> float:
    """Of an iteration: what its batches take to become ready, less what they become ready beside.

    A worker fetches and prepares one batch after the other, so that its two rates add up to one.
    """
    if probed.workers == 0:  # the loop itself reads
        return probed.load_seconds * pace.batches
    return max(0.0, probed.load_seconds * pace.batches / probed.workers - pace.compute_seconds)


def _loading(probed: Probed) -> str:
    load, fetch, prep = _ms(probed.load_seconds), _ms(probed.fetch_seconds), _ms(probed.prep_seconds)
    each, ready = "", ""
    if probed.workers > 1:
        each = f" in each of {probed.workers} workers"
        ready = f", so that one is ready every {_ms(probed.load_seconds / probed.workers)}"
    said = f"a batch takes {load} to load{each}: {fetch} fetching and {prep} preparing{ready}"
    said += f" (over {probed.batches} batches)"
    if probed.fetch_seconds > NOTHING_SAVED * probed.load_seconds:
        return said
    return f"{said}. A second reading saved nothing: the data are cached, or come from where nothing caches them"


def _waiting(probed: Probed, pace: Pace, processors: int) -> list[str]:
    expected = expected_wait_seconds(probed, pace)
    drawn = "" if pace.batches < 1.01 else f" over {pace.batches:.3g} batches"
    computes = f"An iteration computes for {_ms(pace.compute_seconds)}{drawn}"
    waited = f"the last {pace.iterations} waited {_ms(pace.wait_seconds)} each"
    if expected:
        why = "" if probed.workers else ", since nothing is loaded while it computes"
        sentences = [f"{computes} and should wait {_ms(expected)} for data{why}; {waited}"]
        sentences.append(_remedies(probed, pace, processors))
    else:
        sentences = [f"{computes}, and loading keeps up with that; {waited}"]
    if pace.wait_seconds > expected + max(UNEXPLAINED_SECONDS, UNEXPLAINED_SHARE * expected):
        sentences.append(
            "That is more than loading explains: the rest is handing batches over, starting workers anew in every "
            "epoch (persistent_workers=True keeps them), or processors that training needs as well"
        )
    return sentences


def _remedies(probed: Probed, pace: Pace, processors: int) -> str:
    """What would end the wait by itself; where nothing would, what is the greater part of it."""
    found = []
    compute, workers = pace.compute_seconds, probed.workers
    fetch, prep = probed.fetch_seconds * pace.batches, probed.prep_seconds * pace.batches
    # a worker that prepares needs a processor, one that waits for a disk needs none
    if prep <= processors * compute and compute > 0:
        enough = f"num_workers={max(1, math.ceil((fetch + prep) / compute))}"
        found.append(f"{enough}, if the disk serves as many" if fetch > prep else enough)
    if workers and prep <= workers * compute:
        found.append("a faster disk or a cache")
    if workers and fetch <= workers * compute:
        found.append("cheaper preparation")
    if found:
        return f"What would end that: {'; or '.join(found)}"
    if fetch > prep:
        return "The greater part is fetching: a faster disk or a cache helps most"
    return (
        f"The greater part is preparing, and {processors} processors are too few for it: a cheaper one helps most"
    )


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _ms(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
