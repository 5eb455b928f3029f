"""The database as the rest of the server uses it, SQLite or PostgreSQL."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

import anyio
from sqlalchemy import text
from sqlalchemy.engine import URL
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from holdfast_migrations import DriverMissing, Upgraded
from holdfast_server.core.bus import ChangeBus
from holdfast_server.core.settings import database_url
from holdfast_server.db.sqlite import SqliteBackend
from holdfast_server.db.statements import DatabaseBusy, DatabaseClosed, DatabaseUnavailable, require_writable
from holdfast_server.db.units import DatabaseBackend, T, Work, WriteUnit

READS_END_SECONDS = 5.0
READY_SECONDS = 5.0
WAITING_UNITS = 1000

P = ParamSpec("P")

logger = logging.getLogger(__name__)


class Database:
    """Read sessions and write transactions; writes about the same job run one after the other.

    `prepare()` migrates the tables and locks a SQLite file for this process. `open()` and `close()` belong to the
    event loop.

    Raises:
        DriverMissing: the URL names PostgreSQL, and its driver is not installed.
    """

    def __init__(self, database: str, changes: ChangeBus | None = None) -> None:
        self.url: URL = database_url(database)
        self.changes = ChangeBus() if changes is None else changes
        self._backend = _backend(self.url, self.changes)
        self._reader: AsyncEngine | None = None
        self._reading: set[asyncio.Future[None]] = set()
        self._open = False
        self._asked_whether_ready: asyncio.Task[None] | None = None

    @property
    def place(self) -> str:
        """Location of the database, to be displayed."""
        return self._backend.place

    @property
    def path(self) -> Path:
        """Path of the SQLite file."""
        assert isinstance(self._backend, SqliteBackend)
        return self._backend.path

    def prepare(self) -> Upgraded:
        """Migrate the tables to the current revision.

        Raises:
            DatabaseInUse: another server uses the file.
            DatabaseTooNew: a later release has migrated it.
            NotOurDatabase: it is not a Holdfast database.
            CannotStore: the database does not exist, or refuses access.
        """
        return self._backend.prepare()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Lock the SQLite file for this process. Raises DatabaseInUse: a server uses it."""
        assert isinstance(self._backend, SqliteBackend)
        self._backend.take()
        try:
            yield
        finally:
            self._backend.release()

    def release(self) -> None:
        """Unlock the file for other servers."""
        self._backend.release()

    async def open(self) -> None:
        self._reader = await self._backend.open(self._settled)
        self._open = True

    async def close(self) -> None:
        """Refuse new writes, store the waiting ones, and close."""
        self._open = False
        await self._backend.close()
        await self._end_of_reads()
        if self._reader is not None:
            await self._reader.dispose()
        self._reader = None

    async def _end_of_reads(self) -> None:
        """Wait for reads in progress, whose connections must be returned before the event loop ends."""
        try:
            async with asyncio.timeout(READS_END_SECONDS):
                while self._reading:
                    await asyncio.wait(self._reading)
        except TimeoutError:
            logger.warning("%d reads were still in progress when the database was closed", len(self._reading))

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncSession]:
        """Open a read session with one consistent view; keep it short. No task group cancels what is inside.

        Raises:
            DatabaseUnavailable: the database does not answer.
        """
        if self._reader is None:
            raise DatabaseClosed("the database is not open")
        session = AsyncSession(self._reader, expire_on_commit=False)
        done = asyncio.get_running_loop().create_future()
        self._reading.add(done)
        try:
            # the task group of a stream whose client has gone would also cancel the rollback, again and again,
            # so that SQLAlchemy gives up the connection without closing it
            with anyio.CancelScope(shield=True):
                yield session
        except Exception as error:  # of any type of the driver
            if self._backend.unavailable(error):
                raise DatabaseUnavailable(f"the database does not answer: {error}") from error
            raise
        finally:
            # Return the connection to the pool even if the reader is cancelled.
            closing = asyncio.create_task(session.close(), name="holdfast database reader's end")
            self._reading.add(closing)
            closing.add_done_callback(self._reading.discard)
            self._reading.discard(done)
            done.set_result(None)
            await asyncio.shield(closing)

    async def write(
        self, work: Work[T], *, job: str | None = None, at_once: bool = False, samples_only: bool = False
    ) -> T:
        """Run `work` in a transaction, and return its result when that is on disk.

        An exception of `work` rolls back its own changes only. After a rollback by the database, such as for a
        deadlock, `work` runs again. It may run in another thread: it must await only its session, and have no
        other side effects.

        Args:
            work: function of the session.
            job: the job that it is about. Work about one job never runs concurrently, on any instance, and its
                commit notifies the job's subscriptions.
            at_once: notify other instances without delay, because a user or an agent waits.
            samples_only: whether it changes nothing that agents wait for.

        Raises:
            DatabaseBusy: too many writes wait already.
            DatabaseUnavailable: the database does not answer, or the connection was lost; the changes may be
            stored.
        """
        if not self._open:
            raise DatabaseClosed("the server is stopping")
        if self._backend.waiting >= WAITING_UNITS:
            raise DatabaseBusy(f"{WAITING_UNITS} writes wait for the database")
        unit = WriteUnit(work, job, at_once, samples_only)
        self._backend.submit(unit)
        result: T = await unit.done
        return result

    @property
    def pressure(self) -> float:
        """Share of the limit of waiting writes that is used, from 0 to 1."""
        return self._backend.waiting / WAITING_UNITS

    def _settled(self, units: list[WriteUnit]) -> None:
        for unit in units:
            if unit.error is None and unit.job is not None:
                self.changes.publish(unit.job, samples_only=unit.samples_only)
            unit.settle()

    @property
    def writes_waiting(self) -> int:
        return self._backend.waiting

    async def leads(self) -> bool:
        """Return whether this instance runs the background jobs: one at a time does."""
        return await self._backend.leads()

    async def ready(self) -> None:
        """Raise unless the database can be read and written; concurrent calls share one check."""
        if self._asked_whether_ready is None or self._asked_whether_ready.done():
            self._asked_whether_ready = asyncio.create_task(self._ready(), name="holdfast database readiness")
        await asyncio.shield(self._asked_whether_ready)

    async def _ready(self) -> None:
        if not self._open or not self._backend.writing:
            raise DatabaseClosed("the writer has stopped")
        async with self.read() as session:
            await session.execute(text("SELECT version_num FROM alembic_version"))
        # A server with many waiting writes is ready: another instance would not store them sooner.
        with suppress(DatabaseBusy):
            try:
                async with asyncio.timeout(READY_SECONDS):
                    await self.write(require_writable)
            except TimeoutError:
                reason = f"a write waited for more than {READY_SECONDS:g} s"
                raise DatabaseUnavailable(reason) from None


def transaction(
    work: Callable[Concatenate[AsyncSession, P], Awaitable[T]],
) -> Callable[Concatenate[Database, P], Coroutine[Any, Any, T]]:
    """Run a function of a session in a transaction; callers pass the database. `Database.write` has the rules."""

    @wraps(work)
    async def run(db: Database, /, *args: P.args, **named: P.kwargs) -> T:
        return await db.write(lambda session: work(session, *args, **named))

    return run


def job_transaction(
    work: Callable[Concatenate[AsyncSession, str, P], Awaitable[T]],
) -> Callable[Concatenate[Database, str, P], Coroutine[Any, Any, T]]:
    """Run a change of a job, whose name is the second argument, as `transaction` does, and notify at once."""

    @wraps(work)
    async def run(db: Database, job: str, /, *args: P.args, **named: P.kwargs) -> T:
        return await db.write(lambda session: work(session, job, *args, **named), job=job, at_once=True)

    return run


def _backend(url: URL, changes: ChangeBus) -> DatabaseBackend:
    if url.get_backend_name() == "sqlite":
        return SqliteBackend(url)
    try:
        # Imported here: a server with SQLite does not need the driver of PostgreSQL.
        from holdfast_server.db.postgres import PostgresBackend
    except ModuleNotFoundError as error:
        raise DriverMissing(error) from None
    return PostgresBackend(url, changes)
