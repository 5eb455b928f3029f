"""Periodic background jobs of the server: retention, compaction, alerts, order timeouts."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from inspect import iscoroutinefunction

from sqlalchemy.exc import OperationalError

from holdfast_server.db import Database, DatabaseClosed, DatabaseUnavailable

FIRST_AFTER_SECONDS = 5.0
"""Delay of the first run: a server that has just started first serves the agents that wait for it."""
SPREAD = 0.1
"""Random variation of the period, so that instances started together do not stay in step."""

logger = logging.getLogger(__name__)

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class BackgroundJob:
    """A periodic job, which one server instance at a time runs.

    It may be interrupted, and after a lost connection two instances may run it at the same time: it writes through
    `Database.write`, in units that may run twice.
    """

    name: str
    every_seconds: float
    run: Callable[[Database, float], object]
    """Function of the database and the time. It runs in a thread, or if it is a coroutine function, in the event
    loop."""


@asynccontextmanager
async def background_jobs_running(
    jobs: Iterable[BackgroundJob], db: Database, clock: Clock
) -> AsyncIterator[None]:
    """Run the jobs while the context is open. Later, one in a thread ends at its next use of the database."""
    tasks = [asyncio.create_task(_run_periodically(job, db, clock), name=f"holdfast {job.name}") for job in jobs]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def run_once(job: BackgroundJob, db: Database, clock: Clock) -> bool:
    """Run a job once if this instance leads; return whether it ran."""
    try:
        if not await db.ask("background", db.leads):
            return False
        if iscoroutinefunction(job.run):
            await job.run(db, clock())
        else:
            await db.ask("background", partial(job.run, db, clock()))
    except (DatabaseClosed, DatabaseUnavailable, OperationalError) as error:
        logger.warning("skipped background job %s: %s", job.name, error)
        return False
    except Exception:  # keep the job alive: it may raise anything, and runs again later
        logger.exception("background job %s failed; it will run again", job.name)
        return False
    return True


async def _run_periodically(job: BackgroundJob, db: Database, clock: Clock) -> None:
    await asyncio.sleep(min(FIRST_AFTER_SECONDS, job.every_seconds))
    while True:
        await run_once(job, db, clock)
        await asyncio.sleep(job.every_seconds * random.uniform(1 - SPREAD, 1 + SPREAD))  # noqa: S311
