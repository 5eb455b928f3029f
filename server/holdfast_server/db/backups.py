"""Backup of the database while the server runs, and its restoration while it does not."""

from __future__ import annotations

import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

from sqlalchemy import text
from sqlalchemy.engine import URL
from sqlalchemy.exc import DatabaseError

from holdfast_migrations import known_revisions
from holdfast_migrations.connections import connected, place
from holdfast_server.db import Database, size_question


class CannotCopy(RuntimeError):
    """The backup or its restoration failed, and nothing has changed."""


def size_bytes(url: URL) -> int:
    """Return the size of the database, with indexes and free pages. Raises CannotCopy if there is none."""
    if url.get_backend_name() == "sqlite":
        _look_for(Path(str(url.database)))
    try:
        with connected(url) as connection:
            return connection.scalar(text(size_question(connection.dialect.name))) or 0
    except DatabaseError as error:
        raise CannotCopy(f"{place(url)} cannot be read: {error.orig}") from None


def backup(url: URL, file: Path) -> int:
    """Copy a SQLite database as of this moment, and return the size of the copy in bytes.

    Raises:
        CannotCopy: the database is PostgreSQL or missing, or the file exists.
    """
    _only_sqlite(url, "copy it with: pg_dump --format=custom --file={file} {url}", file)
    source = Path(str(url.database))
    _look_for(source)
    if file.exists():
        raise CannotCopy(f"{file} exists: give the backup another name")
    if not file.parent.is_dir():
        raise CannotCopy(f"there is no directory {file.parent}: create it, or name another file")
    part = file.with_name(file.name + ".part")
    with closing(sqlite3.connect(source)) as connection:
        _copy(connection, part)
    _settle(part, file)
    return file.stat().st_size


def put_back(url: URL, file: Path, *, replace: bool) -> Path | None:
    """Restore a backup; return the path to which the previous database was moved, if there was one.

    Raises:
        DatabaseInUse: a server uses the database.
        CannotCopy: the database exists and `replace` is not set, or the backup is invalid, damaged, or of a later
            release.
    """
    _only_sqlite(url, "restore it with: pg_restore --clean --if-exists --dbname={url} {file}", file)
    _look_at(file)
    database = Database(str(url.database))
    target = database.path
    with database.alone():
        kept = None
        if target.exists():
            if not replace:
                raise CannotCopy(f"{target} exists: --replace moves it aside and restores the backup in its place")
            kept = _aside(target)
        part = target.with_name(target.name + ".part")
        with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as connection:
            _copy(connection, part)
        if kept is not None:
            shutil.copymode(target, part)
        if kept is not None:
            _put_aside(target, kept)
        _settle(part, target)
        return kept


def _look_for(database: Path) -> None:
    if not database.exists():
        raise CannotCopy(f"there is no database {database}: name it with --db")


def _only_sqlite(url: URL, command: str, file: Path) -> None:
    if url.get_backend_name() != "sqlite":
        raise CannotCopy(
            f"{place(url)} is PostgreSQL, which has its own tools: {command.format(file=file, url=place(url))}"
        )


def _look_at(file: Path) -> None:
    try:
        with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as connection:
            ((state,),) = connection.execute("PRAGMA quick_check(1)").fetchall()
            revisions = connection.execute("SELECT version_num FROM alembic_version").fetchall()
    except sqlite3.Error as error:
        raise CannotCopy(f"{file} is not a backup of a Holdfast database: {error}") from None
    if state != "ok":
        raise CannotCopy(f"{file} is damaged: {state}")
    if not {revision for (revision,) in revisions} <= known_revisions():
        raise CannotCopy(f"{file} is from a later release of Holdfast: restore it with that release")


def _aside(target: Path) -> Path:
    number = 1
    while (kept := target.with_name(f"{target.name}.replaced-{number}")).exists():
        number += 1
    return kept


def _copy(connection: sqlite3.Connection, part: Path) -> None:
    """Copy to a file that only its owner can read, as the database."""
    part.unlink(missing_ok=True)
    os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    connection.execute("VACUUM INTO ?", (str(part),))


def _put_aside(target: Path, kept: Path) -> None:
    """Move a database aside, after merging its write-ahead log.

    It keeps its old name as well until the copy takes that, so that a database exists even if this is interrupted,
    and no server creates an empty one.
    """
    with closing(sqlite3.connect(target)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    for suffix in ("-wal", "-shm"):
        target.with_name(target.name + suffix).unlink(missing_ok=True)
    try:
        os.link(target, kept)
    except OSError:  # a file system without hard links
        target.rename(kept)


def _settle(part: Path, file: Path) -> None:
    with part.open("rb") as copy:
        os.fsync(copy.fileno())
    part.replace(file)
    directory = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
