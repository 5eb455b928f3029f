"""The database: one writer that commits in groups, many readers, one process per SQLite file."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import event, text
from sqlalchemy.engine import URL, Connection
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import OperationalError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.pool import ConnectionPoolEntry

from holdfast_server.bus import LocalBus
from holdfast_server.settings import database_url, default_database

T = TypeVar("T")
Work = Callable[[AsyncSession], Awaitable[T]]

BUSY_TIMEOUT_MILLISECONDS = 5000
READERS = 4
READS_END_SECONDS = 5.0
GROUP_UNITS = 64
"""Most units that share one commit, and with it one fsync."""
WAITING_UNITS = 1000

SQLITE_MAGIC = b"SQLite format 3\0"

logger = logging.getLogger(__name__)


class DatabaseInUse(RuntimeError):
    """Another server has this file open."""


class DatabaseClosed(RuntimeError):
    """The server is stopping: nothing more is stored."""


class DatabaseBusy(RuntimeError):
    """More waits to be written than the disk keeps up with: come back later."""


@dataclass(slots=True)
class _Unit:
    work: Work[Any]
    job: str | None
    done: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    result: Any = None
    error: Exception | None = None

    def settle(self) -> None:
        if self.done.cancelled():
            return
        if self.error is not None:
            self.done.set_exception(self.error)
        else:
            self.done.set_result(self.result)


class Database:
    """Hands out read sessions, and runs writes one after the other.

    `prepare()` takes the file for this process and brings its tables up to date; `open()` and `close()`
    belong to the event loop.
    """

    def __init__(self, database: str, changes: LocalBus | None = None) -> None:
        self.url: URL = database_url(database)
        self.path = Path(str(self.url.database))
        self.changes = LocalBus() if changes is None else changes
        self._lock_file: int | None = None
        self._readers: AsyncEngine | None = None
        self._writer: AsyncEngine | None = None
        self._queue: asyncio.Queue[_Unit | None] | None = None
        self._reading: set[asyncio.Future[None]] = set()
        self._writing: asyncio.Task[None] | None = None

    def prepare(self) -> list[str]:
        """Take the file, and return the revisions that were applied.

        Raises:
            DatabaseInUse: another server has the file.
            DatabaseTooNew: a later release has migrated it.
            NotOurDatabase: the file, or the directory, is something else.
        """
        from holdfast_migrations import upgrade

        _look_at(self.path)
        if self._lock_file is None:
            self._lock_file = _take(self.path)
        try:
            return upgrade(self.url)
        except BaseException:  # even on Ctrl-C the file is free for the next server
            self.release()
            raise

    def release(self) -> None:
        """Lets another server have the file."""
        if self._lock_file is not None:
            os.close(self._lock_file)
            self._lock_file = None

    async def open(self) -> None:
        self._readers = _engine(self.url, begin="BEGIN", pool_size=READERS)
        self._writer = _engine(self.url, begin="BEGIN IMMEDIATE", pool_size=1)
        self._queue = asyncio.Queue()
        self._writing = asyncio.create_task(self._write_groups(self._queue), name="holdfast database writer")

    async def close(self) -> None:
        """Commits what waits, and takes in nothing more."""
        if self._queue is not None and self._writing is not None:
            queue, self._queue = self._queue, None
            queue.put_nowait(None)
            await self._writing
        await self._end_of_reads()
        for engine in (self._readers, self._writer):
            if engine is not None:
                await engine.dispose()
        self._readers = self._writer = self._writing = None
        self.release()

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
        """One consistent view; keep it short."""
        if self._readers is None:
            raise DatabaseClosed("the database is not open")
        session = AsyncSession(self._readers, expire_on_commit=False)
        done = asyncio.get_running_loop().create_future()
        self._reading.add(done)
        try:
            yield session
        finally:
            # Whoever reads may be cancelled, its connection must come home all the same.
            closing = asyncio.create_task(session.close(), name="holdfast database reader's end")
            self._reading.add(closing)
            closing.add_done_callback(self._reading.discard)
            self._reading.discard(done)
            done.set_result(None)
            await asyncio.shield(closing)

    async def write(self, work: Work[T], *, job: str | None = None) -> T:
        """Run `work` in a transaction of its own, and return only when it is on the disk.

        Units that wait together share one commit; one that raises takes back its own changes alone.
        Listeners of `job` are told after the commit.
        """
        if self._queue is None:
            raise DatabaseClosed("the server is stopping")
        if self._queue.qsize() >= WAITING_UNITS:
            raise DatabaseBusy(f"{WAITING_UNITS} writes wait for the disk already")
        unit = _Unit(work, job)
        self._queue.put_nowait(unit)
        result: T = await unit.done
        return result

    async def ready(self) -> None:
        """Raises unless the database can be read and the writer lives."""
        if self._queue is None or self._writing is None or self._writing.done():
            raise DatabaseClosed("the writer has stopped")
        async with self.read() as session:
            await session.execute(text("SELECT version_num FROM alembic_version"))

    async def _write_groups(self, queue: asyncio.Queue[_Unit | None]) -> None:
        running = True
        while running:
            group = [await queue.get()]
            while len(group) < GROUP_UNITS and not queue.empty():
                group.append(queue.get_nowait())
            running = None not in group
            await self._commit([unit for unit in group if unit is not None])

    async def _commit(self, units: list[_Unit]) -> None:
        assert self._writer is not None
        try:
            async with self._writer.connect() as connection, connection.begin():
                for unit in units:
                    await _attempt(connection, unit)
        except Exception as error:
            # The writer must outlive a full disk: whoever waits is told, and nobody is acknowledged.
            logger.warning("nothing was stored of %d units: %s", len(units), error)
            for unit in units:
                unit.error = error
        for unit in units:
            if unit.error is None and unit.job is not None:
                self.changes.publish(unit.job)
            unit.settle()


async def _attempt(connection: AsyncConnection, unit: _Unit) -> None:
    """Run a unit behind a savepoint: its error is its caller's, and the others in the group go on."""
    session = AsyncSession(connection, join_transaction_mode="create_savepoint", expire_on_commit=False)
    try:
        unit.result = await unit.work(session)
        await session.commit()
    except Exception as error:  # work may raise anything: it is for whoever handed the work in
        unit.error = _first(error)
        try:
            await session.rollback()
        except SQLAlchemyError:
            # On a full disk SQLite has taken back the whole group, and its savepoints with it.
            raise unit.error from None
        if unit.error is not error:
            raise unit.error from None
    finally:
        with suppress(SQLAlchemyError):
            await session.close()


def _first(error: Exception) -> Exception:
    """What went wrong first: a savepoint that is gone by the time of the roll-back hides why it is gone."""
    while isinstance(error, OperationalError) and isinstance(error.__context__, OperationalError):
        error = error.__context__
    return error


def _look_at(path: Path) -> None:
    """NotOurDatabase for what cannot be one; makes the default place, where nobody has stored anything yet."""
    from holdfast_migrations import NotOurDatabase

    if path == default_database().absolute():
        path.parent.mkdir(parents=True, exist_ok=True)
    elif path.parent.parent.is_dir() and not path.parent.exists():
        path.parent.mkdir()  # one folder is meant; a whole path of them is more likely mistyped
    if path.is_dir():
        raise NotOurDatabase(f"{path} is a directory: name a file in it with --db {path / 'holdfast.db'}")
    if not path.parent.is_dir():
        raise NotOurDatabase(
            f"cannot store in {path}: there is no directory {path.parent}; make it, or name another file with --db"
        )
    if path.exists() and _beginning(path) not in (b"", SQLITE_MAGIC):
        raise NotOurDatabase(f"{path} is no SQLite database, and is left as it is: name another file with --db")


def _beginning(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(len(SQLITE_MAGIC))


def _take(path: Path) -> int:
    lock_file = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(lock_file, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(lock_file)
        raise DatabaseInUse(
            f"another Holdfast server (process {holder}) has {path} open: stop it, or give this one its own --db"
        ) from None
    os.ftruncate(lock_file, 0)
    os.pwrite(lock_file, f"{os.getpid()}\n".encode(), 0)
    return lock_file


def _engine(url: URL, *, begin: str, pool_size: int) -> AsyncEngine:
    engine = create_async_engine(url, pool_size=pool_size, max_overflow=0, pool_timeout=30)

    @event.listens_for(engine.sync_engine, "connect")
    def configure(connection: DBAPIConnection, _: ConnectionPoolEntry) -> None:
        # The driver's own BEGIN is deferred: two writers that both read first would both fail to upgrade.
        connection.isolation_level = None
        cursor = connection.cursor()
        for pragma in (
            "journal_mode=WAL",
            "synchronous=FULL",
            f"busy_timeout={BUSY_TIMEOUT_MILLISECONDS}",
            "foreign_keys=ON",
            *(["query_only=ON"] if begin == "BEGIN" else []),
        ):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    @event.listens_for(engine.sync_engine, "begin")
    def start(connection: Connection) -> None:
        connection.exec_driver_sql(begin)

    return engine
