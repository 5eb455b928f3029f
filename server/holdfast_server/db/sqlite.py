"""A SQLite database: one process locks it, one thread commits writes in groups, and many connections read."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread

from sqlalchemy import create_engine, event, text
from sqlalchemy.engine import URL, Engine
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.exc import TimeoutError as NoConnectionLeft
from sqlalchemy.orm import Session
from sqlalchemy.pool import ConnectionPoolEntry, StaticPool

from holdfast_migrations import NotOurDatabase, Upgraded, upgrade
from holdfast_server.core.settings import default_database
from holdfast_server.db.statements import DatabaseInUse, Statement, connection_of
from holdfast_server.db.units import GROUP_UNITS, UnitStatements, WriteUnit, run_unit

BUSY_TIMEOUT_MILLISECONDS = 5000
READER_SECONDS = 10.0
"""Longest wait for a connection to read; shorter than the requests of agents, so that they get the answer."""
CHECKPOINT_PAGES = 4000
"""Pages in the write-ahead log, 16 MB, before a checkpoint moves them to the database: most pages that a batch
changes the next one changes again, and the commit during a checkpoint waits for two more fsyncs."""

READERS_CACHE_KIB = 6 << 10
"""Page cache of each reading connection. The timeline of a long run reads a thousand buckets, nearly each from
another page, which would not fit SQLite's default of 2 MB."""

SQLITE_MAGIC = b"SQLite format 3\0"

logger = logging.getLogger(__name__)


class SqliteBackend:
    def __init__(self, url: URL) -> None:
        self.url = url
        self.path = Path(str(url.database))
        self.place = str(self.path)
        self._locks: list[int] = []
        """Open files that are locked: one next to the database, and the database itself."""
        self._writer: Engine | None = None
        self._session: Session | None = None
        """Session of the writer thread, kept from one commit to the next."""
        self._queue: SimpleQueue[WriteUnit | None] = SimpleQueue()
        self._thread: Thread | None = None

    def prepare(self) -> Upgraded:
        """Lock the file, and migrate its tables to the current revision.

        Raises:
            DatabaseInUse: another server uses the file.
            DatabaseTooNew: a later release has migrated it.
            NotOurDatabase: it is not a Holdfast database.
        """
        self.take()
        try:
            _create(self.path)
            self.take()
            return upgrade(self.url)
        except BaseException:  # unlock the file even on Ctrl-C
            self.release()
            raise

    def take(self) -> None:
        """Lock the file for this process until `release`.

        Raises:
            DatabaseInUse: another server uses it.
            NotOurDatabase: it is not a SQLite file.
        """
        _check_path(self.path)
        place = self.path.resolve()
        if not self._locks:
            self._locks.append(_lock(place.with_name(place.name + ".lock"), self.path, os.O_CREAT))
            os.ftruncate(self._locks[0], 0)
            os.pwrite(self._locks[0], f"{os.getpid()}\n".encode(), 0)
        if len(self._locks) == 1 and place.exists():
            try:
                self._locks.append(_lock(place, self.path))  # a hard link is another path to the same database
            except BaseException:
                self.release()
                raise

    def release(self) -> None:
        """Unlock the file for other servers."""
        while self._locks:
            os.close(self._locks.pop())

    def open(self, settled: Callable[[list[WriteUnit]], None], *, readers: int) -> Engine:
        # reuse the connection that was used last: its cache is warm, and the others stay small
        engine = create_engine(
            self.url, pool_size=readers, max_overflow=0, pool_timeout=READER_SECONDS, pool_use_lifo=True
        )
        _configure(engine, reads_only=True)
        try:
            engine.connect().close()  # what SQLAlchemy asks its first connection is asked here, before any request
        except BaseException:  # `close` does not know this engine yet
            engine.dispose()
            raise
        self._queue = SimpleQueue()
        self._writer = create_engine(self.url, poolclass=StaticPool)
        _configure(self._writer, reads_only=False)
        self._thread = Thread(target=self._write_groups, args=(settled,), name="holdfast-writer", daemon=True)
        self._thread.start()
        return engine

    def close(self) -> None:
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
        self._close_session()
        if self._writer is not None:
            self._writer.dispose()
        self._writer = self._thread = None
        self.release()

    @property
    def waiting(self) -> int:
        return self._queue.qsize()

    @property
    def writing(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def submit(self, unit: WriteUnit) -> None:
        self._queue.put(unit)

    def unavailable(self, error: Exception) -> bool:
        """Return whether no read connection was free in time; other errors of SQLite are reported as they are."""
        return isinstance(error, NoConnectionLeft)

    def leads(self) -> bool:
        return True

    def _write_groups(self, settled: Callable[[list[WriteUnit]], None]) -> None:
        running = True
        while running:
            group = [self._queue.get()]
            with suppress(Empty):
                while len(group) < GROUP_UNITS:
                    group.append(self._queue.get_nowait())
            running = None not in group
            units = [unit for unit in group if unit is not None]
            if units:
                self._commit(units)
                settled(units)

    def _commit(self, units: Sequence[WriteUnit]) -> None:
        """Run units and commit them, in the writer thread."""
        assert self._writer is not None
        try:
            if self._session is None:
                connection = self._writer.connect()
                connection.begin()  # sends nothing; SQLAlchemy takes long to begin and end one for each group
                self._session = Session(
                    connection, join_transaction_mode="create_savepoint", expire_on_commit=False
                )
            if len(units) == 1:  # behind a savepoint, SQLite would copy each page before its first change
                run_unit(self._session, units[0], _TRANSACTION)
                return
            connection = connection_of(self._session)
            _TRANSACTION.begin.run(connection)
            for unit in units:
                run_unit(self._session, unit)
            _TRANSACTION.end.run(connection)
        except Exception as error:  # keep the writer alive: after a full disk it stores again
            self._close_session()
            logger.warning("stored none of %d writes: %s", len(units), error)
            for unit in units:
                unit.error = error

    def _close_session(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            with suppress(SQLAlchemyError):
                session.close()
                connection_of(session).close()


def _check_path(path: Path) -> None:
    """Create the directory of the database if needed.

    Raises:
        NotOurDatabase: the path is a directory, is in a missing directory, or is not a SQLite file.
    """
    if path == default_database().absolute():
        path.parent.mkdir(parents=True, exist_ok=True)
    elif path.parent.parent.is_dir() and not path.parent.exists():
        path.parent.mkdir()  # create one level only: a longer missing path is more likely a typing error
    if path.is_dir():
        raise NotOurDatabase(f"{path} is a directory: name a file in it with --db {path / 'holdfast.db'}")
    if not path.parent.is_dir():
        raise NotOurDatabase(
            f"cannot create {path}: there is no directory {path.parent}; create it, or name another file with --db"
        )
    if path.exists() and _first_bytes(path) not in (b"", SQLITE_MAGIC):
        raise NotOurDatabase(f"{path} is not a SQLite database: name another file with --db")


def _create(path: Path) -> None:
    """Create the file for its owner only, because it has secrets; SQLite gives its other files the same mode."""
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))


def _first_bytes(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(len(SQLITE_MAGIC))


def _lock(file: Path, database: Path, flags: int = 0) -> int:
    """Open a file and lock it. SQLite's own locks are of another kind."""
    descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        text = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
        os.close(descriptor)
        holder = f"process {text}" if text.isdigit() else "under another name of the file"
        raise DatabaseInUse(
            f"another Holdfast server ({holder}) uses {database}: stop it, or use another file with --db"
        ) from None
    return descriptor


def _configure(engine: Engine, *, reads_only: bool) -> None:
    @event.listens_for(engine, "connect")
    def set_up(connection: DBAPIConnection, _: ConnectionPoolEntry) -> None:
        _set_up(connection, reads_only=reads_only)

    if reads_only:
        event.listen(engine, "begin", _BEGIN_READ.run)


_BEGIN_READ = Statement(text("BEGIN"))
_TRANSACTION = UnitStatements(*(Statement(text(sql)) for sql in ("BEGIN IMMEDIATE", "COMMIT", "ROLLBACK")))


def _set_up(connection: DBAPIConnection, *, reads_only: bool) -> None:
    # The driver's BEGIN is deferred: two writers that both read first could both fail to upgrade their lock.
    connection.isolation_level = None
    cursor = connection.cursor()
    for pragma in (
        "journal_mode=WAL",
        "synchronous=FULL",
        f"busy_timeout={BUSY_TIMEOUT_MILLISECONDS}",
        f"wal_autocheckpoint={CHECKPOINT_PAGES}",
        "foreign_keys=ON",
        # the writer's savepoints stay in memory: SQLite otherwise creates a file for each that changes over 64 KB
        *(["query_only=ON", f"cache_size=-{READERS_CACHE_KIB}"] if reads_only else ["temp_store=MEMORY"]),
    ):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()
