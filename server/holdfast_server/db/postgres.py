"""A PostgreSQL database, which several instances of the server may share.

Units run at READ COMMITTED, under an advisory lock on their job, or on one lock for all units about no job. Under
the lock a unit reads what was committed before, so it may read, decide and write as on SQLite, which has one
writer. SERIALIZABLE would need no lock, but would repeat the reports of a job's many ranks again and again.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress

import asyncpg
from sqlalchemy import func, select, text
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as NoConnectionLeft
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.pool import NullPool

from holdfast_migrations import Upgraded, upgrade
from holdfast_server.core.bus import ChangeBus
from holdfast_server.db.relay import ChangeRelay
from holdfast_server.db.statements import DatabaseUnavailable, job_key, lock_key
from holdfast_server.db.units import GROUP_UNITS, WriteUnit, run_unit

READERS = 8
WRITERS = 8
"""Number of jobs whose units run at the same time."""
CONNECT_SECONDS = 5.0
COMMAND_SECONDS = 40.0
"""Timeout of a command for a server that has gone; the server's own limits, below, are shorter."""
SESSION_SETTINGS = {
    "application_name": "holdfast",
    "jit": "off",  # compilation takes longer than any of our queries
    "statement_timeout": "30s",
    "lock_timeout": "10s",
    "idle_in_transaction_session_timeout": "60s",
}
ATTEMPTS = 8
LONGEST_PAUSE_SECONDS = 1.0

_TAKEN_BACK = ("40001", "40P01")
"""Serialization failure and deadlock: the database has rolled back the transaction."""
_OUT_OF_REACH = ("08", "28", "3D", "53", "57P")
"""Prefixes of states: no connection, access denied, no database, no resources, server stopping or starting."""
_OUT_OF_PATIENCE = ("55P03", "57014")
"""States of timeouts of locks and statements."""
_STALE_PLAN = "0A000"
"""State after another instance migrated the tables; the driver prepares the statement again."""

logger = logging.getLogger(__name__)


class PostgresBackend:
    def __init__(self, url: URL, changes: ChangeBus) -> None:
        self.url = url
        self.place = url.set(drivername="postgresql").render_as_string(hide_password=True)
        self._relay = ChangeRelay(lambda: connect(url), changes)
        self._writer: AsyncEngine | None = None
        self._settled: Callable[[list[WriteUnit]], None] = lambda _: None
        self._lanes: dict[str | None, deque[WriteUnit]] = {}
        self._slots = asyncio.Semaphore(WRITERS)
        self._tasks: set[asyncio.Task[None]] = set()
        self._listening: asyncio.Task[None] | None = None
        self._leading: AsyncConnection | None = None
        self._asking = asyncio.Lock()
        """Lock that lets one background job at a time ask whether this instance leads, with one connection."""

    def prepare(self) -> Upgraded:
        return upgrade(self.url)

    def release(self) -> None:
        """Do nothing: any number of servers may use the database."""

    async def open(self, settled: Callable[[list[WriteUnit]], None]) -> AsyncEngine:
        self._settled = settled
        self._lanes, self._slots, self._asking = {}, asyncio.Semaphore(WRITERS), asyncio.Lock()
        # A unit that gets a lost connection detects this and runs again.
        self._writer = _engine(self.url, pool_size=WRITERS, isolation_level="READ COMMITTED")
        self._listening = asyncio.create_task(self._relay.run(), name="holdfast database listener")
        with suppress(TimeoutError):
            async with asyncio.timeout(CONNECT_SECONDS):
                await self._relay.listening.wait()
        readers = _engine(self.url, pool_size=READERS, isolation_level="REPEATABLE READ", pool_pre_ping=True)
        return readers.execution_options(postgresql_readonly=True)

    async def close(self) -> None:
        while self._tasks:
            await asyncio.wait(self._tasks)
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.gather(self._listening, return_exceptions=True)
        if self._leading is not None:
            await _end(self._leading)
        if self._writer is not None:
            await self._writer.dispose()
        self._writer = self._listening = self._leading = None

    @property
    def waiting(self) -> int:
        return sum(map(len, self._lanes.values()))

    @property
    def writing(self) -> bool:
        return self._writer is not None

    def submit(self, unit: WriteUnit) -> None:
        """Queue a unit behind the others of its job, with which it shares a connection and commits."""
        if unit.job in self._lanes:
            self._lanes[unit.job].append(unit)
            return
        self._lanes[unit.job] = deque([unit])
        task = asyncio.create_task(self._drain(unit.job), name="holdfast database writer")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _drain(self, job: str | None) -> None:
        units = self._lanes[job]
        while units:
            async with self._slots:
                group = [units.popleft() for _ in range(min(GROUP_UNITS, len(units)))]
                await self._commit(group)
            for unit in group:
                if unit.error is None and unit.job is not None:
                    self._relay.announce(unit.job, at_once=unit.at_once, samples_only=unit.samples_only)
                if unit.error is not None and self.unavailable(unit.error):
                    unit.error = _unavailable(unit.error)
            self._settled(group)
        del self._lanes[job]

    async def _commit(self, units: list[WriteUnit]) -> None:
        for pause in _pauses():
            committing = False
            assert self._writer is not None
            try:
                async with self._writer.connect() as connection:
                    await connection.begin()
                    await _run(connection, units)
                    committing = True
                    await connection.commit()
                    return
            except Exception as error:
                # on any error the units fail, and no batch is acknowledged
                if pause is not None and self._may_run_again(error, committing=committing):
                    await asyncio.sleep(pause)
                    continue
                logger.warning("stored none of %d writes: %s", len(units), error)
                for unit in units:
                    unit.error = error
                return

    def _may_run_again(self, error: Exception, *, committing: bool) -> bool:
        """Return whether units may run again: before COMMIT is sent, a lost transaction is always rolled back.

        After that its outcome is unknown. Agents send a batch again under the same name; users look first.
        """
        if committing:
            return _state(error) in _TAKEN_BACK
        return self.unavailable(error) or _state(error) in (*_TAKEN_BACK, _STALE_PLAN)

    def unavailable(self, error: Exception) -> bool:
        if isinstance(error, OSError | NoConnectionLeft | DatabaseUnavailable | asyncpg.InterfaceError):
            return True
        if isinstance(error, DBAPIError) and error.connection_invalidated:
            return True
        state = _state(error)
        return state.startswith(_OUT_OF_REACH) or state in _OUT_OF_PATIENCE

    async def leads(self) -> bool:
        """Return whether this instance holds the lock, which lasts as long as its connection, or gets it now."""
        async with self._asking:
            return await self._holds_the_lock() or await self._takes_the_lock()

    async def _holds_the_lock(self) -> bool:
        if self._leading is None:
            return False
        try:
            await self._leading.execute(text("SELECT 1"))
        except (OSError, SQLAlchemyError):
            lost, self._leading = self._leading, None
            await _end(lost)
        return self._leading is not None

    async def _takes_the_lock(self) -> bool:
        try:
            connection = await connect(self.url)
        except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, SQLAlchemyError) as error:
            raise _unavailable(error) from error
        try:
            if await connection.scalar(select(func.pg_try_advisory_lock(lock_key("chores")))):
                self._leading = connection
        finally:
            if self._leading is None:
                await _end(connection)
        return self._leading is not None


async def connect(url: URL) -> AsyncConnection:
    """Open a long-lived connection outside the pools, with autocommit."""
    return await _engine(url, poolclass=NullPool, isolation_level="AUTOCOMMIT").connect()


def _engine(url: URL, **options: object) -> AsyncEngine:
    async def connected() -> asyncpg.Connection:
        # the driver interprets the URL as libpq does: sslmode, passfile, several hosts
        dsn = url.set(drivername="postgresql").render_as_string(hide_password=False)
        connection = await asyncpg.connect(
            dsn, timeout=CONNECT_SECONDS, command_timeout=COMMAND_SECONDS, server_settings=SESSION_SETTINGS
        )
        try:
            # An acknowledged batch must be on disk, even if the user or database has this turned off.
            await connection.execute(
                "SELECT set_config('synchronous_commit', 'on', false) "
                "WHERE current_setting('synchronous_commit') = 'off'"
            )
        except BaseException:  # also when cancelled: nothing else refers to the connection yet
            connection.terminate()
            raise
        return connection

    pooled = {} if "poolclass" in options else {"max_overflow": 0, "pool_timeout": CONNECT_SECONDS}
    return create_async_engine(url, async_creator=connected, **pooled, **options)


async def _run(connection: AsyncConnection, units: list[WriteUnit]) -> None:
    await connection.execute(select(func.pg_advisory_xact_lock(job_key(units[0].job))))
    for unit in units:
        session = AsyncSession(connection, join_transaction_mode="create_savepoint", expire_on_commit=False)
        await run_unit(session, unit)
        if unit.error is None:
            continue
        if connection.invalidated:
            raise DatabaseUnavailable("the connection was lost") from unit.error
        if _state(unit.error) in (*_TAKEN_BACK, _STALE_PLAN):
            raise unit.error


async def _end(connection: AsyncConnection) -> None:
    with suppress(OSError, SQLAlchemyError):
        await connection.close()


def _pauses() -> Iterator[float | None]:
    """Before each further attempt, with full jitter; None after the last."""
    for number in range(ATTEMPTS):
        yield random.uniform(0, min(LONGEST_PAUSE_SECONDS, 0.02 * 2**number))  # noqa: S311
    yield None


def _state(error: BaseException | None) -> str:
    """PostgreSQL's five characters for what went wrong; empty for what is no error of its."""
    while error is not None:
        if isinstance(state := getattr(error, "sqlstate", None), str):
            return state
        error = error.orig if isinstance(error, DBAPIError) else error.__cause__
    return ""


def _unavailable(error: Exception) -> DatabaseUnavailable:
    if isinstance(error, DatabaseUnavailable):
        return error
    unavailable = DatabaseUnavailable(f"the database does not answer: {error}")
    unavailable.__cause__ = error
    return unavailable
