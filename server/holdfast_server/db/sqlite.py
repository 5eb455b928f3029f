"""A SQLite file: one process has it, one writer commits in groups, and many read."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

from sqlalchemy import create_engine, event
from sqlalchemy.engine import URL, Connection, Engine
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from sqlalchemy.pool import ConnectionPoolEntry, StaticPool

from holdfast_migrations import NotOurDatabase, Upgraded, upgrade
from holdfast_server.core.settings import default_database
from holdfast_server.db.statements import DatabaseInUse
from holdfast_server.db.units import GROUP_UNITS, T, Unit, attempt

BUSY_TIMEOUT_MILLISECONDS = 5000
READERS = 4
CHECKPOINT_PAGES = 4000
"""How long the journal grows, 16 MB, before its pages go to where they belong: most of what a batch changes is
changed again by the next, and whoever commits at that moment waits for two more fsyncs."""

READERS_CACHE_KIB = 6 << 10
"""Of each connection that reads. A long run is drawn from a thousand buckets, nearly each in a page of its own,
which SQLite's own 2 MB do not hold: every look at the run would read them all again."""

SQLITE_MAGIC = b"SQLite format 3\0"

P = ParamSpec("P")

logger = logging.getLogger(__name__)


class SqliteStore:
    def __init__(self, url: URL) -> None:
        self.url = url
        self.path = Path(str(url.database))
        self.place = str(self.path)
        self._lock_file: int | None = None
        self._writer: Engine | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._queue: asyncio.Queue[Unit | None] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    def prepare(self) -> Upgraded:
        """Take the file, and bring its tables up to date.

        Raises:
            DatabaseInUse: another server has the file.
            DatabaseTooNew: a later release has migrated it.
            NotOurDatabase: the file, or the directory, is something else.
        """
        self.take()
        try:
            _make(self.path)
            return upgrade(self.url)
        except BaseException:  # even on Ctrl-C the file is free for the next server
            self.release()
            raise

    def take(self) -> None:
        """From here to `release` the file is this process's.

        Raises:
            DatabaseInUse: another server has it.
            NotOurDatabase: the file, or the directory, is something else.
        """
        _look_at(self.path)
        if self._lock_file is None:
            self._lock_file = _take(self.path)

    def release(self) -> None:
        """Lets another server have the file."""
        if self._lock_file is not None:
            os.close(self._lock_file)
            self._lock_file = None

    async def open(self, settled: Callable[[list[Unit]], None]) -> AsyncEngine:
        self._queue = asyncio.Queue()
        self._writer = create_engine(self.url.set(drivername="sqlite"), poolclass=StaticPool)
        _configure(self._writer, begin="BEGIN IMMEDIATE")
        self._thread = ThreadPoolExecutor(1, "holdfast-writer")
        self._task = asyncio.create_task(self._write_groups(settled), name="holdfast database writer")
        # the connection that was used last is used next: its cache is warm, and the others stay small
        readers = create_async_engine(
            self.url, pool_size=READERS, max_overflow=0, pool_timeout=30, pool_use_lifo=True
        )
        _configure(readers.sync_engine, begin="BEGIN")
        return readers

    async def close(self) -> None:
        if self._task is not None and self._thread is not None:
            self._queue.put_nowait(None)
            await self._task
            self._thread.shutdown()
        if self._writer is not None:
            self._writer.dispose()
        self._writer = self._thread = self._task = None
        self.release()

    @property
    def waiting(self) -> int:
        return self._queue.qsize()

    @property
    def writing(self) -> bool:
        return self._task is not None and not self._task.done()

    def submit(self, unit: Unit) -> None:
        self._queue.put_nowait(unit)

    def unavailable(self, error: Exception) -> bool:
        """A file is there or is not: its errors are told as they are."""
        return False

    async def leads(self) -> bool:
        return True

    async def _write_groups(self, settled: Callable[[list[Unit]], None]) -> None:
        running = True
        while running:
            group = [await self._queue.get()]
            while len(group) < GROUP_UNITS and not self._queue.empty():
                group.append(self._queue.get_nowait())
            running = None not in group
            units = [unit for unit in group if unit is not None]
            if units:
                await asyncio.get_running_loop().run_in_executor(self._thread, self._commit, units)
                settled(units)

    def _commit(self, units: Sequence[Unit]) -> None:
        """In the writer's thread."""
        assert self._writer is not None
        try:
            with self._writer.connect() as connection, connection.begin():
                for unit in units:
                    _run(attempt(ThreadSession(connection), unit))
        except Exception as error:  # keep the writer alive: after a full disk it stores again
            logger.warning("nothing was stored of %d units: %s", len(units), error)
            for unit in units:
                unit.error = error


class ThreadSession(AsyncSession):
    """A session whose statements run at once, in the thread that awaits them.

    It is for the writer's thread, which has nothing else to do meanwhile. Readers share the server's event loop,
    which must not wait: aiosqlite runs their statements in threads.
    """

    def __init__(self, connection: Connection) -> None:
        super().__init__(join_transaction_mode="create_savepoint", expire_on_commit=False)
        self.sync_session.bind = connection

    async def execute(self, *arguments: Any, **named: Any) -> Any:
        return self.sync_session.execute(*arguments, **named)

    async def run_sync(self, fn: Callable[Concatenate[Session, P], T], *arg: P.args, **kw: P.kwargs) -> T:
        return fn(self.sync_session, *arg, **kw)


def _run(work: Coroutine[Any, Any, None]) -> None:
    """Run work that awaits a ThreadSession and nothing else: it comes to its end without an event loop."""
    elsewhere = RuntimeError("a unit of work awaits something other than its session")
    try:
        work.send(None)
        work.throw(elsewhere)  # as an error of the unit's own: the others in its group go on
    except StopIteration:
        return
    work.close()
    raise elsewhere


def _look_at(path: Path) -> None:
    """NotOurDatabase for what cannot be one; makes the default place, where nobody has stored anything yet."""
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


def _make(path: Path) -> None:
    """For whoever runs the server alone: it holds secrets of channels, and what everybody trains. SQLite gives the
    files beside it the same rights."""
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))


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


def _configure(engine: Engine, *, begin: str) -> None:
    @event.listens_for(engine, "connect")
    def configure(connection: DBAPIConnection, _: ConnectionPoolEntry) -> None:
        # The driver's own BEGIN is deferred: two writers that both read first would both fail to upgrade.
        connection.isolation_level = None
        cursor = connection.cursor()
        for pragma in (
            "journal_mode=WAL",
            "synchronous=FULL",
            f"busy_timeout={BUSY_TIMEOUT_MILLISECONDS}",
            f"wal_autocheckpoint={CHECKPOINT_PAGES}",
            "foreign_keys=ON",
            *(["query_only=ON", f"cache_size=-{READERS_CACHE_KIB}"] if begin == "BEGIN" else []),
        ):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    @event.listens_for(engine, "begin")
    def start(connection: Connection) -> None:
        connection.exec_driver_sql(begin)
