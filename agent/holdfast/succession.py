"""Who trains a job now, by its store: a supervisor must not take it from another attempt that has begun since."""

from __future__ import annotations

import logging
from collections.abc import Collection

from holdfast.store import newest_attempt, open_store
from holdfast.supervision import Trained

logger = logging.getLogger("holdfast")


def taken_over(trained: Trained, own: Collection[str] = ()) -> str | None:
    """Who else has begun a newer attempt of the job; None where nobody has, or the store cannot be asked.

    `own` are the uids of attempts that are this supervisor's as well.
    """
    if not trained.attempt:
        return None
    try:
        newest = newest_attempt(open_store(trained.store), trained.job)
    except (OSError, ValueError) as error:
        logger.debug("the store cannot be asked for the newest attempt: %s", error)
        return None
    if newest is None or newest.number <= trained.attempt or newest.uid in (trained.uid, *own):
        return None
    return f"attempt {newest.number} of {trained.job} was started on {newest.host} (process {newest.pid})"
