"""The database as the rest of the server knows it, whichever kind it is."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path

from sqlalchemy import text
from sqlalchemy.engine import URL
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from holdfast_migrations import DriverMissing, Upgraded
from holdfast_server.core.bus import LocalBus
from holdfast_server.core.settings import database_url
from holdfast_server.db.sqlite import SqliteStore
from holdfast_server.db.statements import DatabaseBusy, DatabaseClosed, DatabaseUnavailable, require_writable
from holdfast_server.db.units import Store, T, Unit, Work

READS_END_SECONDS = 5.0
READY_SECONDS = 5.0
WAITING_UNITS = 1000

logger = logging.getLogger(__name__)


class Database:
    """Hands out read sessions, and runs writes: those about one job one after the other.

    `prepare()` brings its tables up to date, and takes a file for this process; `open()` and `close()` belong to
    the event loop.

    Raises:
        DriverMissing: it is a PostgreSQL, and what talks to one is not installed.
    """

    def __init__(self, database: str, changes: LocalBus | None = None) -> None:
        self.url: URL = database_url(database)
        self.changes = LocalBus() if changes is None else changes
        self._store = _store(self.url, self.changes)
        self._reader: AsyncEngine | None = None
        self._reading: set[asyncio.Future[None]] = set()
        self._open = False
        self._asked_whether_ready: asyncio.Task[None] | None = None
        self._view: ContextVar[AsyncSession | None] = ContextVar("view", default=None)

    @property
    def place(self) -> str:
        """Where it stores, to be shown to people."""
        return self._store.place

    @property
    def path(self) -> Path:
        """Of the SQLite file."""
        assert isinstance(self._store, SqliteStore)
        return self._store.path

    def prepare(self) -> Upgraded:
        """Bring the tables up to date.

        Raises:
            DatabaseInUse: another server has the file.
            DatabaseTooNew: a later release has migrated it.
            NotOurDatabase: it is something else.
            CannotStore: there is no such database, or no way into it.
        """
        return self._store.prepare()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """The SQLite file is nobody else's meanwhile.

        Raises:
            DatabaseInUse: a server has it.
        """
        assert isinstance(self._store, SqliteStore)
        self._store.take()
        try:
            yield
        finally:
            self._store.release()

    def release(self) -> None:
        """Lets another server have the file."""
        self._store.release()

    async def open(self) -> None:
        self._reader = await self._store.open(self._settled)
        self._open = True

    async def close(self) -> None:
        """Stores what waits, and takes in nothing more."""
        self._open = False
        await self._store.close()
        await self._end_of_reads()
        if self._reader is not None:
            await self._reader.dispose()
        self._reader = None

    async def _end_of_reads(self) -> None:
        """A connection that is still in use when the event loop ends would be torn from it."""
        try:
            async with asyncio.timeout(READS_END_SECONDS):
                while self._reading:
                    await asyncio.wait(self._reading)
        except TimeoutError:
            logger.warning("%d reads of the database had not ended when it was closed", len(self._reading))

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncSession]:
        """One consistent view; keep it short.

        Raises:
            DatabaseUnavailable: the database does not answer.
        """
        if (view := self._view.get()) is not None:
            yield view
            return
        if self._reader is None:
            raise DatabaseClosed("the database is not open")
        session = AsyncSession(self._reader, expire_on_commit=False)
        done = asyncio.get_running_loop().create_future()
        self._reading.add(done)
        try:
            yield session
        except Exception as error:  # of whatever kind the driver has: the store knows which mean that it is gone
            if self._store.unavailable(error):
                raise DatabaseUnavailable(f"the database does not answer: {error}") from error
            raise
        finally:
            # Whoever reads may be cancelled, its connection must come home all the same.
            closing = asyncio.create_task(session.close(), name="holdfast database reader's end")
            self._reading.add(closing)
            closing.add_done_callback(self._reading.discard)
            self._reading.discard(done)
            done.set_result(None)
            await asyncio.shield(closing)

    @asynccontextmanager
    async def one_view(self) -> AsyncIterator[None]:
        """Whatever is read inside, one after the other, is read of one moment, and no row of it twice."""
        async with self.read() as session:
            token = self._view.set(session)
            try:
                yield
            finally:
                self._view.reset(token)

    async def write(
        self, work: Work[T], *, job: str | None = None, at_once: bool = False, samples_only: bool = False
    ) -> T:
        """Run `work` in a transaction of its own, and return only when it is on the disk.

        Work that raises takes back its own changes alone. Where the database has taken them back, as after a
        deadlock, `work` runs again. It may run in another thread: it awaits its session, and changes nothing else.

        Args:
            work: what is to be done.
            job: the one that it is about. Work about one job runs alone, on all instances, and the listeners of
                that job are told when it is stored.
            at_once: tell listeners at other instances without delay, where a person or an agent waits.
            samples_only: it changes nothing that agents wait for.

        Raises:
            DatabaseBusy: more waits already than the database keeps up with.
            DatabaseUnavailable: the database does not answer, or broke off; what was asked may be stored.
        """
        if not self._open:
            raise DatabaseClosed("the server is stopping")
        if self._store.waiting >= WAITING_UNITS:
            raise DatabaseBusy(f"{WAITING_UNITS} writes wait for the database already")
        unit = Unit(work, job, at_once, samples_only)
        self._store.submit(unit)
        result: T = await unit.done
        return result

    @property
    def pressure(self) -> float:
        """How much of the room for waiting writes is taken, from 0 to 1."""
        return self._store.waiting / WAITING_UNITS

    def _settled(self, units: list[Unit]) -> None:
        for unit in units:
            if unit.error is None and unit.job is not None:
                self.changes.publish(unit.job, samples_only=unit.samples_only)
            unit.settle()

    @property
    def writes_waiting(self) -> int:
        return self._store.waiting

    async def leads(self) -> bool:
        """Whether this instance sees to the chores: one at a time does."""
        return await self._store.leads()

    async def ready(self) -> None:
        """Raises unless the database can be read and written. Many who ask together are one question."""
        if self._asked_whether_ready is None or self._asked_whether_ready.done():
            self._asked_whether_ready = asyncio.create_task(self._ready(), name="holdfast database readiness")
        await asyncio.shield(self._asked_whether_ready)

    async def _ready(self) -> None:
        if not self._open or not self._store.writing:
            raise DatabaseClosed("the writer has stopped")
        async with self.read() as session:
            await session.execute(text("SELECT version_num FROM alembic_version"))
        # A server that has much to store is ready: another one would not get it stored sooner.
        with suppress(DatabaseBusy):
            try:
                async with asyncio.timeout(READY_SECONDS):
                    await self.write(require_writable)
            except TimeoutError:
                reason = f"what is to be written waits for more than {READY_SECONDS:g} s"
                raise DatabaseUnavailable(reason) from None


def _store(url: URL, changes: LocalBus) -> Store:
    if url.get_backend_name() == "sqlite":
        return SqliteStore(url)
    try:
        # Here, so that a server that stores in a file needs no driver of PostgreSQL.
        from holdfast_server.db.postgres import PostgresStore
    except ModuleNotFoundError as error:
        raise DriverMissing(error) from None
    return PostgresStore(url, changes)
