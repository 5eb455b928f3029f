"""How attempts end: each notes it in the store when it can, and the next counts those that failed."""

from __future__ import annotations

import itertools
import logging
import time

from holdfast.errors import Fenced
from holdfast.protocol.messages import INTENDED_ENDS, REQUESTED_EXITS
from holdfast.store import Attempt, Ending, Store

logger = logging.getLogger("holdfast")

STARTING_SECONDS = 60.0
"""An attempt that says nothing and was followed so soon is taken for a start that failed, not for training that
did: of those there may be many in a row."""


def record_ending(store: Store, job: str, attempt: int, reason: str, iterations: int) -> None:
    """Say in the store how `attempt` ends, having trained so many iterations."""
    try:
        store.append(job, Ending(attempt=attempt, reason=reason, iterations=iterations, at=time.time()))
    except (OSError, Fenced) as error:
        logger.debug("%s: how attempt %d ended is not noted: %s", job, attempt, error)


def failures_between(store: Store, job: str, first: int, present: int, last_exit: str | None = None) -> int:
    """How many attempts from `first` up to the one before `present` failed while they trained.

    One that was stopped by a person or a scheduler did not, nor one that ended before it had trained. `first` has
    taken a checkpoint, and so has trained.

    Args:
        last_exit: how the last of them ended, as its supervisor saw it.
    """
    try:
        attempts = store.records(job, Attempt, first)
        endings = {ending.attempt: ending for ending in store.records(job, Ending, first)}
    except OSError:  # it is a figure for planning, for which no start waits; none is better than a wrong one
        return 0
    failed = 0
    for attempt, following in itertools.pairwise(attempts):
        if following.number > present:
            break
        if following.number == present and last_exit in REQUESTED_EXITS:
            continue
        if (ending := endings.get(attempt.number)) is not None:
            failed += ending.reason not in INTENDED_ENDS and ending.iterations > 0
        else:
            failed += attempt.number == first or _lasted(attempt, following)
    return failed


def _lasted(attempt: Attempt, following: Attempt) -> bool:
    return following.started_at - attempt.started_at >= STARTING_SECONDS
