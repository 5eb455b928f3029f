"""The database as the rest of the server uses it, SQLite or PostgreSQL."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from threading import Condition, Lock
from typing import Concatenate, ParamSpec

from sqlalchemy import text
from sqlalchemy.engine import URL, Engine
from sqlalchemy.orm import Session

from holdfast_migrations import DriverMissing, Upgraded, require_tables
from holdfast_server.core.bus import ChangeBus
from holdfast_server.core.settings import database_url
from holdfast_server.db.request_threads import CONNECTIONS, RequestClass, RequestThreads
from holdfast_server.db.sqlite import SqliteBackend
from holdfast_server.db.statements import DatabaseBusy, DatabaseClosed, DatabaseUnavailable, require_writable
from holdfast_server.db.units import DatabaseBackend, T, Work, WriteUnit
from holdfast_server.models.base import Base

READS_END_SECONDS = 5.0
READY_SECONDS = 5.0
WAITING_UNITS = 1000

P = ParamSpec("P")

logger = logging.getLogger(__name__)


class Database:
    """Read sessions and write transactions; writes about the same job run one after the other.

    `prepare()` migrates the tables and locks a SQLite file for this process. All methods block, except `submit`,
    and `ask` and `stored` for the event loop.

    Raises:
        DriverMissing: the URL names PostgreSQL, and its driver is not installed.
    """

    def __init__(self, database: str, changes: ChangeBus | None = None) -> None:
        self.url: URL = database_url(database)
        self.changes = ChangeBus() if changes is None else changes
        self._backend = _backend(self.url, self.changes)
        self._reader: Engine | None = None
        self._reading = 0
        self._read_ended = Condition()
        self._threads = RequestThreads()
        self._submitting = Lock()
        """Held while `_open` changes: no write is submitted once the database closes."""
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
            NotOurDatabase: it is not a Holdfast database, or one from before the first release.
            CannotStore: the database does not exist, or refuses access.
        """
        upgraded = self._backend.prepare()
        try:
            tables = Base.metadata.tables.items()
            require_tables(self.url, {name: table.columns.keys() for name, table in tables})
        except BaseException:  # unlock the file even on Ctrl-C
            self.release()
            raise
        return upgraded

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

    def open(self) -> None:
        self._threads = RequestThreads()
        self._reader = self._backend.open(self._settled, readers=CONNECTIONS)
        self._open = True

    def close(self) -> None:
        """Refuse new writes, store the waiting ones, and close."""
        with self._submitting:
            self._open = False
        self._backend.close()
        reader, self._reader = self._reader, None
        self._threads.close()
        with self._read_ended:
            if not self._read_ended.wait_for(lambda: self._reading == 0, READS_END_SECONDS):
                logger.warning("%d reads were still in progress when the database was closed", self._reading)
        if reader is not None:
            reader.dispose()

    async def ask(self, name: RequestClass, work: Callable[[], T]) -> T:
        """Run a function in a thread of a class of requests. The event loop must not wait for the database."""
        if not self._open:
            raise DatabaseClosed("the server is stopping")
        return await self._threads.run(name, work)

    @contextmanager
    def read(self) -> Iterator[Session]:
        """Open a read session with one consistent view; keep it short.

        Raises:
            DatabaseUnavailable: the database does not answer.
        """
        reader = self._reader
        if reader is None:
            raise DatabaseClosed("the database is not open")
        with self._read_ended:
            self._reading += 1
        try:
            with Session(reader, expire_on_commit=False) as session:
                yield session
        except Exception as error:  # of any type of the driver
            if self._backend.unavailable(error):
                raise DatabaseUnavailable(f"the database does not answer: {error}") from error
            raise
        finally:
            with self._read_ended:
                self._reading -= 1
                self._read_ended.notify_all()

    def write(
        self, work: Work[T], *, job: str | None = None, at_once: bool = False, samples_only: bool = False
    ) -> T:
        """Run `work` in a transaction, and return its result when that is on disk.

        An exception of `work` rolls back its own changes only. After a rollback by the database, such as for a
        deadlock, `work` runs again. It runs in another thread: it must use only its session, and have no other
        side effects.

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
        return self.submit(work, job=job, at_once=at_once, samples_only=samples_only).result()

    def submit(
        self, work: Work[T], *, job: str | None = None, at_once: bool = False, samples_only: bool = False
    ) -> Future[T]:
        """Begin what `write` does, and do not wait for it: units that wait together share a commit."""
        done = Future[T]()
        self._submit(WriteUnit(work, job, at_once, samples_only, done=done))
        return done

    async def stored(
        self, work: Work[T], *, job: str | None = None, at_once: bool = False, samples_only: bool = False
    ) -> T:
        """Wait for what `write` does, without a thread."""
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._submit(WriteUnit(work, job, at_once, samples_only, done=done))
        return await done

    def _submit(self, unit: WriteUnit) -> None:
        if self._backend.waiting >= WAITING_UNITS:
            raise DatabaseBusy(f"{WAITING_UNITS} writes wait for the database")
        with self._submitting:
            if not self._open:
                raise DatabaseClosed("the server is stopping")
            self._backend.submit(unit)

    @property
    def pressure(self) -> float:
        """Share of the limit of waiting writes that is used, from 0 to 1."""
        return self._backend.waiting / WAITING_UNITS

    def _settled(self, units: list[WriteUnit]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[WriteUnit]] = {}
        for unit in units:
            if unit.error is None and unit.job is not None:
                self.changes.publish(unit.job, samples_only=unit.samples_only)
            if isinstance(unit.done, asyncio.Future):
                by_loop.setdefault(unit.done.get_loop(), []).append(unit)
            else:
                unit.settle()
        for loop, some in by_loop.items():
            with suppress(RuntimeError):  # the loop has ended, and nobody waits
                loop.call_soon_threadsafe(_settle, some)

    @property
    def writes_waiting(self) -> int:
        return self._backend.waiting

    def leads(self) -> bool:
        """Return whether this instance runs the background jobs: one at a time does."""
        return self._backend.leads()

    async def ready(self) -> None:
        """Raise unless the database can be read and written; concurrent calls share one check."""
        if self._asked_whether_ready is None or self._asked_whether_ready.done():
            self._asked_whether_ready = asyncio.create_task(self._ready(), name="holdfast database readiness")
        await asyncio.shield(self._asked_whether_ready)

    async def _ready(self) -> None:
        if not self._open or not self._backend.writing:
            raise DatabaseClosed("the writer has stopped")
        await self.ask("access", self._read_revision)
        # A server with many waiting writes is ready: another instance would not store them sooner.
        with suppress(DatabaseBusy):
            try:
                async with asyncio.timeout(READY_SECONDS):
                    await self.stored(require_writable)
            except TimeoutError:
                reason = f"a write waited for more than {READY_SECONDS:g} s"
                raise DatabaseUnavailable(reason) from None

    def _read_revision(self) -> None:
        with self.read() as session:
            session.execute(text("SELECT version_num FROM alembic_version"))


def _settle(units: list[WriteUnit]) -> None:
    for unit in units:
        unit.settle()


def transaction(work: Callable[Concatenate[Session, P], T]) -> Callable[Concatenate[Database, P], T]:
    """Run a function of a session in a transaction; callers pass the database. `Database.write` has the rules."""

    @wraps(work)
    def run(db: Database, /, *args: P.args, **named: P.kwargs) -> T:
        return db.write(lambda session: work(session, *args, **named))

    return run


def job_transaction(
    work: Callable[Concatenate[Session, str, P], T],
) -> Callable[Concatenate[Database, str, P], T]:
    """Run a change of a job, whose name is the second argument, as `transaction` does, and notify at once."""

    @wraps(work)
    def run(db: Database, job: str, /, *args: P.args, **named: P.kwargs) -> T:
        return db.write(lambda session: work(session, job, *args, **named), job=job, at_once=True)

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
