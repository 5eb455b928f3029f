"""A PostgreSQL database, which several instances of the server may share.

Units run at READ COMMITTED, behind an advisory lock on the job that they are about, or on all that is about no
job: what a unit reads under the lock is what was committed before it got it, so that it may look, decide and write
as it does on SQLite, where there is one writer. SERIALIZABLE would need no lock, and run the reports of a job's
many ranks again and again.
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
from holdfast_server.core.bus import LocalBus
from holdfast_server.db.relay import Relay
from holdfast_server.db.statements import DatabaseUnavailable, job_key, lock_key
from holdfast_server.db.units import GROUP_UNITS, Unit, attempt

READERS = 8
WRITERS = 8
"""Units about as many different jobs are stored at a time."""
CONNECT_SECONDS = 5.0
COMMAND_SECONDS = 40.0
"""After which a server that is not there any more is given up; its own limit, below, comes first."""
SESSION_SETTINGS = {
    "application_name": "holdfast",
    "jit": "off",  # compiling takes longer than any of our questions
    "statement_timeout": "30s",
    "lock_timeout": "10s",
    "idle_in_transaction_session_timeout": "60s",
}
ATTEMPTS = 8
LONGEST_PAUSE_SECONDS = 1.0

_TAKEN_BACK = ("40001", "40P01")
"""Serialization failure, deadlock: the database has taken the transaction back, and says so."""
_OUT_OF_REACH = ("08", "28", "3D", "53", "57P")
"""Beginnings of states: no connection, not let in, nothing there, no resources, a server that stops or starts."""
_OUT_OF_PATIENCE = ("55P03", "57014")
"""A lock, or an answer, took too long."""
_STALE_PLAN = "0A000"
"""Another instance has migrated the tables; the driver prepares the statement again."""

logger = logging.getLogger(__name__)


class PostgresStore:
    def __init__(self, url: URL, changes: LocalBus) -> None:
        self.url = url
        self.place = url.set(drivername="postgresql").render_as_string(hide_password=True)
        self._relay = Relay(lambda: connect(url), changes)
        self._writer: AsyncEngine | None = None
        self._settled: Callable[[list[Unit]], None] = lambda _: None
        self._lanes: dict[str | None, deque[Unit]] = {}
        self._slots = asyncio.Semaphore(WRITERS)
        self._tasks: set[asyncio.Task[None]] = set()
        self._listening: asyncio.Task[None] | None = None
        self._leading: AsyncConnection | None = None
        self._asking = asyncio.Lock()
        """Whether this instance leads is asked by one chore at a time: two would each open a connection for it."""

    def prepare(self) -> Upgraded:
        return upgrade(self.url)

    def release(self) -> None:
        """Any number of servers may have the database."""

    async def open(self, settled: Callable[[list[Unit]], None]) -> AsyncEngine:
        self._settled = settled
        self._lanes, self._slots, self._asking = {}, asyncio.Semaphore(WRITERS), asyncio.Lock()
        # A connection that was lost is noticed by the unit that is given it, and that unit runs again.
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

    def submit(self, unit: Unit) -> None:
        """Units about one job wait for each other here, so that they take one connection and share commits."""
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

    async def _commit(self, units: list[Unit]) -> None:
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
                # Whatever it is, whoever waits is told, and nobody is acknowledged.
                if pause is not None and self._may_run_again(error, committing=committing):
                    await asyncio.sleep(pause)
                    continue
                logger.warning("nothing was stored of %d units: %s", len(units), error)
                for unit in units:
                    unit.error = error
                return

    def _may_run_again(self, error: Exception, *, committing: bool) -> bool:
        """What was lost before COMMIT was sent is taken back for certain. After that nobody knows: agents send
        again, under the name that they gave their batch, and people look before they do."""
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
        """One instance holds the lock, for as long as its connection lives; the others ask for it now and then."""
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
    """A connection outside the pools, to be held; every statement stands for itself."""
    return await _engine(url, poolclass=NullPool, isolation_level="AUTOCOMMIT").connect()


def _engine(url: URL, **options: object) -> AsyncEngine:
    async def connected() -> asyncpg.Connection:
        # The driver reads what is written in the URL as libpq does: sslmode, passfile, several hosts.
        dsn = url.set(drivername="postgresql").render_as_string(hide_password=False)
        connection = await asyncpg.connect(
            dsn, timeout=CONNECT_SECONDS, command_timeout=COMMAND_SECONDS, server_settings=SESSION_SETTINGS
        )
        try:
            # An acknowledgement is a promise; somebody may have set this for the user or the whole database.
            await connection.execute(
                "SELECT set_config('synchronous_commit', 'on', false) "
                "WHERE current_setting('synchronous_commit') = 'off'"
            )
        except BaseException:  # cancelled, too: nobody else knows of the connection yet
            connection.terminate()
            raise
        return connection

    pooled = {} if "poolclass" in options else {"max_overflow": 0, "pool_timeout": CONNECT_SECONDS}
    return create_async_engine(url, async_creator=connected, **pooled, **options)


async def _run(connection: AsyncConnection, units: list[Unit]) -> None:
    await connection.execute(select(func.pg_advisory_xact_lock(job_key(units[0].job))))
    for unit in units:
        session = AsyncSession(connection, join_transaction_mode="create_savepoint", expire_on_commit=False)
        await attempt(session, unit)
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
