"""Checkpoints in one SQLite file: `sqlite:///home/me/checkpoints.db`.

An example of a store in a package of its own. SQLite transactions give what a store must guarantee: a commit is
atomic and durable, and one attempt at a time holds the write lock, so that the check for a newer attempt and what
depends on it happen at once. For large states a directory is faster.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import socket
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from holdfast.errors import DamagedCheckpoint, Fenced
from holdfast.format.manifest import MANIFEST
from holdfast.protocol.field_types import MAX_ATTEMPT
from holdfast.protocol.ids import parse_checkpoint_id, validate_job
from holdfast.store import Attempt, Leftover, Store
from holdfast.store.base import FileReader, Pace
from holdfast.store.records import FOLDERS, require_number

SCHEME = "sqlite://"
PIECE_BYTES = 4 << 20
SCHEMA = """
CREATE TABLE IF NOT EXISTS records (job, name, data, PRIMARY KEY (job, name));
CREATE TABLE IF NOT EXISTS folders (
    id INTEGER PRIMARY KEY AUTOINCREMENT, job, checkpoint, attempt, name UNIQUE, state, by_attempt
);  -- state: begun, committed, damaged (by_attempt replaced it)
CREATE TABLE IF NOT EXISTS pieces (
    folder REFERENCES folders ON DELETE CASCADE, file, start, data, PRIMARY KEY (folder, file, start)
);
"""


def open_sqlite(url: str) -> SqliteStore:
    """Open the store in an SQLite file, which is created when a job first starts in it."""
    path = Path(url.removeprefix(SCHEME))
    if not path.is_absolute() or path.is_dir():
        raise ValueError(
            f"store {url!r}: give the absolute path of a file, as in sqlite:///home/me/checkpoints.db"
        )
    return SqliteStore(path)


class SqliteStore(Store):
    """A `Store` in an SQLite file; see `holdfast.store.base` for the guarantees."""

    read_threads = 1
    shares_files = False

    def __init__(self, path: Path) -> None:
        self.path = path
        self.url = f"{SCHEME}{path}"
        self._in_use = threading.local()

    @contextlib.contextmanager
    def transaction(self, mode: str = "IMMEDIATE") -> Iterator[sqlite3.Connection]:
        """Run the block in one transaction, or in that of a block around it in this thread."""
        if (outer := getattr(self._in_use, "connection", None)) is not None:
            yield outer
            return
        try:
            with contextlib.closing(sqlite3.connect(self.path, timeout=60, isolation_level=None)) as connection:
                connection.executescript(f"PRAGMA foreign_keys = ON; PRAGMA synchronous = FULL; {SCHEMA}")
                connection.execute(f"BEGIN {mode}")
                self._in_use.connection = connection
                try:
                    yield connection
                    connection.execute("COMMIT")  # an error before it rolls back: the connection is closed
                finally:
                    self._in_use.connection = None
        except sqlite3.Error as error:
            raise OSError(errno.EIO, str(error), self.url) from error

    def rows(self, statement: str, *values: object) -> list[tuple[object, ...]]:
        """Return the rows of a query; none from a file that does not exist."""
        if not self.path.exists():
            return []
        with self.transaction("DEFERRED") as connection:
            return connection.execute(statement, values).fetchall()

    def free_bytes(self) -> int | None:
        found = os.statvfs(self.path.parent)
        return found.f_bavail * found.f_frsize

    def jobs(self) -> list[str]:
        found = self.rows("SELECT DISTINCT job FROM records WHERE name LIKE 'attempts/%' ORDER BY job")
        return [str(job) for (job,) in found]

    def checkpoints(self, job: str) -> list[str]:
        found = self.rows("SELECT checkpoint FROM folders WHERE job = ? AND state = 'committed'", job)
        return sorted((str(checkpoint) for (checkpoint,) in found), key=parse_checkpoint_id)

    def find(self, job: str, checkpoint: str) -> int:
        """Return the id of the folder of a committed checkpoint."""
        query = "SELECT id FROM folders WHERE job = ? AND checkpoint = ? AND state = 'committed'"
        for (folder,) in self.rows(query, job, checkpoint):
            assert isinstance(folder, int)
            return folder
        raise DamagedCheckpoint(f"{self.url}/{job}/{checkpoint}/{MANIFEST}", "there is no such checkpoint")

    def open_file(self, job: str, checkpoint: str, file: str, *, from_disk: bool = False) -> SqliteReader:
        return SqliteReader(self, job, checkpoint, file)

    def begin(self, job: str, checkpoint: str, attempt: int, size_bytes: int) -> SqliteWriter:
        name = f"{attempt:08d}-{checkpoint}-{secrets.token_hex(4)}"
        with self.fenced(job, attempt), self.transaction() as connection:
            values = (validate_job(job), checkpoint, attempt, name)
            connection.execute("INSERT INTO folders VALUES (NULL, ?, ?, ?, ?, 'begun', NULL)", values)
        return SqliteWriter(self, job, checkpoint, attempt, name)

    def join(self, job: str, checkpoint: str, attempt: int, folder: str, size_bytes: int) -> SqliteWriter:
        if not re.fullmatch(f"{attempt:08d}-{checkpoint}-[0-9a-f]{{8}}", folder):
            raise ValueError(f"{folder!r} is not a folder in which attempt {attempt} writes {checkpoint}")
        self.require_newest(job, attempt)
        return SqliteWriter(self, job, checkpoint, attempt, folder, joined=True)

    def file_replacer(self, job: str, checkpoint: str) -> SqliteReplacer:
        return SqliteReplacer(self, job, checkpoint)

    def delete(self, job: str, checkpoint: str, attempt: int) -> None:
        with self.fenced(job, attempt), self.transaction() as connection:
            doomed = (job, checkpoint)
            query = "DELETE FROM folders WHERE job = ? AND checkpoint = ? AND state = 'committed'"
            if not connection.execute(query, doomed).rowcount:
                raise FileNotFoundError(errno.ENOENT, "there is no checkpoint of that name", f"{self.url}/{job}")

    def acquire_attempt(self, job: str, uid: str, at_least: int = 1, *, order: str | None = None) -> Attempt:
        host, pid = socket.gethostname(), os.getpid()
        with self.transaction() as connection:
            number = max(self.latest_attempt(validate_job(job)) + 1, at_least)
            require_number(number, MAX_ATTEMPT, "attempt", job, self.url)
            attempt = Attempt(number=number, uid=uid, host=host, pid=pid, started_at=time.time(), order=order)
            name = f"{FOLDERS[Attempt]}/{self.record_name(attempt)}"
            self.create_record(job, name, msgspec.json.encode(attempt))
            connection.execute("DELETE FROM folders WHERE job = ? AND state != 'committed'", (job,))
        return attempt

    def leftovers(self, job: str) -> list[Leftover]:
        query = """
            SELECT name, state, attempt, by_attempt, COALESCE(SUM(LENGTH(data)), 0)
            FROM folders LEFT JOIN pieces ON folder = id
            WHERE job = ? AND (state = 'damaged' OR state = 'begun' AND attempt != ?) GROUP BY id
        """
        found = []
        for name, state, attempt, by, size in self.rows(query, job, self.latest_attempt(job)):
            is_damaged = state == "damaged"
            what = (
                f"set aside as damaged by attempt {by}" if is_damaged else f"left unfinished by attempt {attempt}"
            )
            assert isinstance(size, int)
            found.append(Leftover(name=str(name), what=what, size_bytes=size))
        return found

    def remove_leftover(self, job: str, name: str) -> None:
        if any(leftover.name == name for leftover in self.leftovers(job)):
            with self.transaction() as connection:
                connection.execute("DELETE FROM folders WHERE job = ? AND name = ?", (job, name))

    @contextlib.contextmanager
    def fenced(self, job: str, attempt: int) -> Iterator[None]:
        with self.transaction():
            self.require_newest(job, attempt)
            yield

    def require_newest(self, job: str, attempt: int) -> None:
        if (newest := self.latest_attempt(job)) > attempt:
            raise Fenced(f"attempt {newest} of {job} has started; attempt {attempt} can no longer commit")

    def read_record(self, job: str, name: str) -> bytes:
        for (data,) in self.rows("SELECT data FROM records WHERE job = ? AND name = ?", job, name):
            assert isinstance(data, bytes)
            return data
        raise FileNotFoundError(errno.ENOENT, "there is no such record", f"{self.url}/{job}/{name}")

    def record_files(self, job: str, folder: str) -> Iterable[str]:
        found = self.rows("SELECT name FROM records WHERE job = ? AND name LIKE ? || '/%'", job, folder)
        return [str(name).removeprefix(f"{folder}/") for (name,) in found]

    def create_record(self, job: str, name: str, data: bytes) -> None:
        with self.transaction() as connection:
            values = (validate_job(job), name, data)
            if not connection.execute("INSERT OR IGNORE INTO records VALUES (?, ?, ?)", values).rowcount:
                raise FileExistsError(errno.EEXIST, "there is a record of that name", f"{self.url}/{job}/{name}")

    def remove_records(self, job: str, names: Iterable[str]) -> None:
        with self.transaction() as connection:
            pairs = [(job, name) for name in names]
            connection.executemany("DELETE FROM records WHERE job = ? AND name = ?", pairs)


class SqliteReader(FileReader):
    """A file of a checkpoint."""

    def __init__(self, store: SqliteStore, job: str, checkpoint: str, file: str) -> None:
        self._store, self._folder, self._file = store, store.find(job, checkpoint), file
        self._where = f"{store.url}/{job}/{checkpoint}/{file}"
        query = "SELECT MAX(start + LENGTH(data)) FROM pieces WHERE folder = ? AND file = ?"
        ((size_bytes,),) = store.rows(query, self._folder, file)
        if not isinstance(size_bytes, int):
            raise DamagedCheckpoint(self._where, "there is no such file")
        self.size_bytes = size_bytes

    def read_into(self, start: int, target: memoryview) -> None:
        end = start + len(target)
        if end > self.size_bytes:
            raise DamagedCheckpoint(self._where, f"ends at byte {self.size_bytes:,}")
        query = """
            SELECT start, data FROM pieces WHERE folder = ? AND file = ? AND start < ? AND start + LENGTH(data) > ?
        """
        filled = 0
        for at, data in self._store.rows(query, self._folder, self._file, end, start):
            assert isinstance(at, int)
            assert isinstance(data, bytes)
            first, last = max(at, start), min(at + len(data), end)
            target[first - start : last - start] = data[first - at : last - at]
            filled += last - first
        if filled != len(target):
            raise DamagedCheckpoint(self._where, "the file no longer exists")


class SqliteWriter:
    """Writes a checkpoint in a folder of its own, which nothing reads before it is committed."""

    def __init__(
        self, store: SqliteStore, job: str, checkpoint: str, attempt: int, folder: str, *, joined: bool = False
    ) -> None:
        self._store, self._job, self._checkpoint, self._attempt = store, job, checkpoint, attempt
        self.folder, self._joined = folder, joined

    def write(self, file: str, parts: Sequence[memoryview | bytes], *, pace: Pace | None = None) -> None:
        for start, data in pieces(parts):  # one transaction each: others write while this one waits
            if pace is not None:
                pace(len(data))
            with self._store.transaction() as connection:
                values = (self._begun(), file, start, data)
                connection.execute("INSERT INTO pieces VALUES (?, ?, ?, ?)", values)

    def copy_file(
        self, job: str, checkpoint: str, file: str, *, only_link: bool = False, size_bytes: int | None = None
    ) -> None:
        if only_link:
            raise OSError(errno.EOPNOTSUPP, "SQLite has no links", self._store.url)
        with self._store.transaction() as connection:
            query = "INSERT INTO pieces SELECT ?, file, start, data FROM pieces WHERE folder = ? AND file = ?"
            source = self._store.find(job, checkpoint)
            if not connection.execute(query, (self._begun(), source, file)).rowcount:
                raise DamagedCheckpoint(f"{self._store.url}/{job}/{checkpoint}/{file}", "there is no such file")
            length = "SELECT sum(length(data)) FROM pieces WHERE folder = ? AND file = ?"
            ((found,),) = connection.execute(length, (source, file))
            if size_bytes not in (None, found):  # raising undoes the copy
                where = f"{self._store.url}/{job}/{checkpoint}/{file}"
                raise DamagedCheckpoint(where, f"is {found:,} bytes long, not {size_bytes:,}")

    def make_durable(self) -> None:
        self._begun()  # each transaction is durable

    def commit(self, manifest: bytes, *, replace: bool = False) -> None:
        assert not self._joined, "the process that began the checkpoint commits it"
        self.write(MANIFEST, [manifest])
        with self._store.fenced(self._job, self._attempt), self._store.transaction() as connection:
            query = """
                UPDATE folders SET state = 'damaged', by_attempt = ?
                WHERE job = ? AND checkpoint = ? AND state = 'committed'
            """
            of = (self._attempt, self._job, self._checkpoint)
            if connection.execute(query, of).rowcount and not replace:  # raising undoes it
                where = f"{self._store.url}/{self._job}/{self._checkpoint}"
                raise FileExistsError(errno.EEXIST, "there is a checkpoint of that name", where)
            connection.execute("UPDATE folders SET state = 'committed' WHERE id = ?", (self._begun(),))

    def abort(self) -> None:
        if not self._joined:
            with contextlib.suppress(OSError), self._store.transaction() as connection:
                values = (self._job, self.folder)
                connection.execute("DELETE FROM folders WHERE job = ? AND name = ? AND state = 'begun'", values)

    def _begun(self) -> int:
        """Return the id of the folder, unless a newer attempt or `abort` has removed it."""
        query = "SELECT id FROM folders WHERE job = ? AND name = ?"
        for (folder,) in self._store.rows(query, self._job, self.folder):
            assert isinstance(folder, int)
            return folder
        self._store.require_newest(self._job, self._attempt)
        raise OSError(errno.ENOENT, "the checkpoint was aborted", f"{self._store.url}/{self._job}")


class SqliteReplacer:
    """Replaces files of a checkpoint, unless it was replaced itself."""

    def __init__(self, store: SqliteStore, job: str, checkpoint: str) -> None:
        self._store, self._job, self._checkpoint = store, job, checkpoint
        self._attempt, self._folder = store.latest_attempt(job), store.find(job, checkpoint)

    def replace(self, file: str, parts: Sequence[memoryview | bytes], *, pace: Pace | None = None) -> None:
        if pace is not None:
            pace(sum(map(len, parts)))
        with self._store.fenced(self._job, self._attempt), self._store.transaction() as connection:
            if self._store.find(self._job, self._checkpoint) != self._folder:
                raise Fenced(f"{self._checkpoint} of {self._job} was replaced during its repair")
            connection.execute("DELETE FROM pieces WHERE folder = ? AND file = ?", (self._folder, file))
            values = [(self._folder, file, start, data) for start, data in pieces(parts)]
            connection.executemany("INSERT INTO pieces VALUES (?, ?, ?, ?)", values)


def pieces(parts: Sequence[memoryview | bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield (start, bytes) of the rows of a file; one even of an empty file."""
    start = 0
    for part in parts:
        for at in range(0, len(part), PIECE_BYTES):
            data = bytes(memoryview(part)[at : at + PIECE_BYTES])
            yield start, data
            start += len(data)
    if not start:
        yield 0, b""
