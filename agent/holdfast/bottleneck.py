"""What loading data means for training: whether an iteration waits for them, for what, and what would help."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

from holdfast.probe import Probed

NOTHING_SAVED = 0.03
"""Below this share of loading, what a second reading saves is noise."""
UNEXPLAINED_SECONDS = 0.002
UNEXPLAINED_SHARE = 0.25
"""A wait is longer than loading explains when it exceeds that by both."""


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
