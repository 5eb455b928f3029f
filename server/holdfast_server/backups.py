"""A copy of all that is stored, made while the server runs, and put back while it does not."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path

from sqlalchemy import text
from sqlalchemy.engine import URL

from holdfast_migrations import known_revisions
from holdfast_migrations.connections import connected, place
from holdfast_server.db import Database


class CannotCopy(RuntimeError):
    """It was not copied; nothing has changed."""


def size_bytes(url: URL) -> int:
    """All that is stored, tables, indexes and what is free in between."""
    pages = "SELECT page_count * page_size FROM pragma_page_count(), pragma_page_size()"
    question = pages if url.get_backend_name() == "sqlite" else "SELECT pg_database_size(current_database())"
    with connected(url) as connection:
        return connection.scalar(text(question)) or 0


def in_words(size_bytes: float) -> str:
    value = float(size_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"


def backup(url: URL, file: Path) -> int:
    """Copy a SQLite database as it is at this moment, and return the copy's size in bytes.

    Raises:
        CannotCopy: it is a PostgreSQL database, or there is a file of that name, or no database.
    """
    _only_sqlite(url, "copy it with: pg_dump --format=custom --file={file} {url}", file)
    source = Path(str(url.database))
    if not source.exists():
        raise CannotCopy(f"there is no database {source}: name it with --db")
    if file.exists():
        raise CannotCopy(f"{file} is there already: give the copy another name")
    if not file.parent.is_dir():
        raise CannotCopy(f"there is no directory {file.parent}: make it, or name another file")
    part = file.with_name(file.name + ".part")
    part.unlink(missing_ok=True)
    with closing(sqlite3.connect(source)) as connection:
        connection.execute("VACUUM INTO ?", (str(part),))
    _settle(part, file)
    return file.stat().st_size


def put_back(url: URL, file: Path, *, replace: bool) -> Path | None:
    """Make a copy the database again; returns where the one that was there is now.

    Raises:
        CannotCopy: a server has the database, or it holds something and may not be replaced, or the copy is none,
            or damaged, or of a later release.
    """
    _only_sqlite(url, "put it back with: pg_restore --clean --if-exists --dbname={url} {file}", file)
    _look_at(file)
    database = Database(str(url.database))
    target = database.path
    with database.alone():
        kept = None
        if target.exists():
            if not replace:
                raise CannotCopy(f"{target} is there already: --replace puts it aside, and the copy in its place")
            kept = _aside(target)
        part = target.with_name(target.name + ".part")
        part.unlink(missing_ok=True)
        with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as connection:
            connection.execute("VACUUM INTO ?", (str(part),))
        if kept is not None:
            _put_aside(target, kept)
        _settle(part, target)
        return kept


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
        raise CannotCopy(f"{file} is no copy of a Holdfast database: {error}") from None
    if state != "ok":
        raise CannotCopy(f"{file} is damaged: {state}")
    if not {revision for (revision,) in revisions} <= known_revisions():
        raise CannotCopy(f"{file} is of a later release of Holdfast: put it back with that one")


def _aside(target: Path) -> Path:
    number = 1
    while (kept := target.with_name(f"{target.name}.replaced-{number}")).exists():
        number += 1
    return kept


def _put_aside(target: Path, kept: Path) -> None:
    """With what is in its log, which belongs to it."""
    with closing(sqlite3.connect(target)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    target.rename(kept)
    for suffix in ("-wal", "-shm"):
        target.with_name(target.name + suffix).unlink(missing_ok=True)


def _settle(part: Path, file: Path) -> None:
    with part.open("rb") as copy:
        os.fsync(copy.fileno())
    part.replace(file)
    directory = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
