"""Changes, carried from instance to instance by PostgreSQL's LISTEN and NOTIFY.

A NOTIFY takes a lock on the whole database when it commits, so that one in each transaction of ingest would cost
three quarters of its throughput: what changes is gathered for a moment, and told together. A connection that is
lost loses what was told meanwhile, so that what listeners wait for is looked up as well, now and then.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from typing import Any

import asyncpg
from sqlalchemy import ARRAY, Text, any_, bindparam, select, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection

from holdfast_server import models
from holdfast_server.core.bus import LocalBus

CHANNEL = "holdfast_changes"
EVERYTHING = ""
"""Told instead of names when there are many of them: look at all that you wait for."""
SAMPLES = "~"
"""Before the name of a job of which only samples came: no job's name begins so."""
MOST_NAMES = 500
GATHER_SECONDS = 0.25
POLL_SECONDS = 5.0
ANSWER_SECONDS = 5.0
LONGEST_PAUSE_SECONDS = 2.0

logger = logging.getLogger(__name__)


class Relay:
    """Tells other instances what changed here, and listeners here what changed there."""

    def __init__(self, connect: Callable[[], Awaitable[AsyncConnection]], changes: LocalBus) -> None:
        self._connect = connect
        self._changes = changes
        self._gathered: set[str] = set()
        self._wake = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._seen: dict[str, int] = {}
        self.listening = asyncio.Event()
        """Set once the first connection listens."""

    def announce(self, job: str, *, at_once: bool, samples_only: bool = False) -> None:
        self._gathered.add(SAMPLES + job if samples_only else job)
        if at_once:
            self._wake.set()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(GATHER_SECONDS, self._wake.set)

    async def run(self) -> None:
        """Until it is cancelled."""
        pause = 0.0
        while True:
            try:
                connection = await self._connect()
            except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, SQLAlchemyError) as error:
                pause = min(LONGEST_PAUSE_SECONDS, 2 * pause + 0.1)
                logger.warning("changes at other instances are not heard: %s", error)
                await asyncio.sleep(random.uniform(0, pause))  # noqa: S311
                continue
            pause = 0.0
            try:
                await self._listen(connection)
            except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, SQLAlchemyError) as error:
                logger.warning("the connection that hears of changes at other instances was lost: %s", error)
            finally:
                with suppress(OSError, asyncpg.PostgresError, asyncpg.InterfaceError, SQLAlchemyError):
                    await asyncio.shield(connection.close())

    async def _listen(self, connection: AsyncConnection) -> None:
        raw = await connection.get_raw_connection()
        driver: Any = raw.driver_connection
        await driver.add_listener(CHANNEL, self._heard)
        driver.add_termination_listener(lambda _: self._wake.set())
        # Nobody knows what was told before this moment.
        self._changes.publish_all()
        self.listening.set()
        clock = asyncio.get_running_loop().time
        look_at = clock() + POLL_SECONDS
        while not driver.is_closed():
            with suppress(TimeoutError):
                async with asyncio.timeout_at(look_at):
                    await self._wake.wait()
            async with asyncio.timeout(ANSWER_SECONDS):
                if self._wake.is_set():
                    await self._tell(connection)
                if clock() >= look_at:  # however much there is to tell
                    await self._look(connection)
                    look_at = clock() + POLL_SECONDS

    async def _tell(self, connection: AsyncConnection) -> None:
        self._wake.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        names, self._gathered = self._gathered, set()
        if not names:
            return
        told = _few({name for name in names if name.startswith(SAMPLES)}, SAMPLES + EVERYTHING)
        told += _few({name for name in names if not name.startswith(SAMPLES)}, EVERYTHING)
        try:
            await connection.execute(
                text("SELECT pg_notify(:channel, name) FROM unnest(CAST(:names AS text[])) AS told(name)"),
                {"channel": CHANNEL, "names": told},
            )
        except BaseException:  # cancelled, too: what was not told is told later
            self._gathered |= names
            raise

    def _heard(self, connection: Any, pid: int, _: str, job: str) -> None:
        if pid == connection.get_server_pid():
            return
        samples_only, name = job.startswith(SAMPLES), job.removeprefix(SAMPLES)
        if name == EVERYTHING:
            self._changes.publish_all(samples_only=samples_only)
        else:
            self._changes.publish(name, samples_only=samples_only)

    async def _look(self, connection: AsyncConnection) -> None:
        """At what agents wait for. Open pages need no look: they draw themselves anew now and then anyway."""
        jobs = models.JobRecord
        names = bindparam("names", sorted(self._changes.listened()), ARRAY(Text))
        found = await connection.execute(select(jobs.name, jobs.version).where(jobs.name == any_(names)))
        versions = {name: version for name, version in found}  # noqa: C416 - rows are not plain tuples
        for job, version in versions.items():
            if self._seen.get(job) != version:
                self._changes.publish(job)
        self._seen = versions


def _few(names: Collection[str], otherwise: str) -> list[str]:
    return sorted(names) if len(names) <= MOST_NAMES else [otherwise]
