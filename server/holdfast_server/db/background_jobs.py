"""What the server does by itself: retention, roll-ups, alerts, orders that nobody took up."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from holdfast_server.db import Database, DatabaseUnavailable

FIRST_AFTER_SECONDS = 5.0
"""A server that has just started has agents waiting at its door."""
SPREAD = 0.1
"""Several instances that were started together do not stay in step."""

logger = logging.getLogger(__name__)

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Chore:
    """Something to be done again and again, by one instance at a time.

    It may break off in the middle, and on a lost connection two instances may be at it for a moment: what it
    writes goes through `Database.write`, in units that may be run twice.
    """

    name: str
    every_seconds: float
    run: Callable[[Database, float], Awaitable[object]]
    """Given the database and the time."""


@asynccontextmanager
async def kept_up(chores: Iterable[Chore], db: Database, clock: Clock) -> AsyncIterator[None]:
    """Runs the chores as long as the context is open; one that is under way when it closes is broken off."""
    tasks = [asyncio.create_task(_keep_up(chore, db, clock), name=f"holdfast {chore.name}") for chore in chores]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def do(chore: Chore, db: Database, clock: Clock) -> bool:
    """Do it once, unless another instance sees to the chores; whether it was done."""
    try:
        if not await db.leads():
            return False
        await chore.run(db, clock())
    except DatabaseUnavailable as error:
        logger.warning("the chore %s was left out: %s", chore.name, error)
        return False
    except Exception:  # whatever it is, the server goes on, and tries again
        logger.exception("the chore %s failed, and is tried again", chore.name)
        return False
    return True


async def _keep_up(chore: Chore, db: Database, clock: Clock) -> None:
    await asyncio.sleep(min(FIRST_AFTER_SECONDS, chore.every_seconds))
    while True:
        await do(chore, db, clock)
        await asyncio.sleep(chore.every_seconds * random.uniform(1 - SPREAD, 1 + SPREAD))  # noqa: S311
