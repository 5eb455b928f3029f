"""Migrations with Alembic, in a module of their own because importing Alembic is slow."""

from __future__ import annotations

import os
import shutil
from functools import cache
from importlib.resources import files
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import URL, Connection, create_engine, inspect

from holdfast_migrations.connections import (
    DatabaseTooNew,
    NotOurDatabase,
    columns,
    patiently,
    place,
    require_columns,
)


def upgrade(connection: Connection, url: URL, revision: str) -> tuple[list[str], Path | None]:
    """Return the applied revisions, oldest first, and the copy of the SQLite file before them."""
    scripts = _scripts()
    with connection.begin():
        before = MigrationContext.configure(connection).get_current_revision()
        _check_whose(connection, url, before, scripts)
        if before is not None and before != scripts.get_current_head():
            require_columns(connection, url, before, _columns_at(before))
    missing = [script.revision for script in scripts.iterate_revisions(revision, before or "base")]
    if not missing:
        return [], None
    kept = None
    if before is not None and connection.dialect.name == "sqlite":
        kept = _keep(connection, Path(str(url.database)), before)
    patiently(connection, lambda: command.upgrade(_config(connection), revision))
    return missing[::-1], kept


def _keep(connection: Connection, file: Path, revision: str) -> Path:
    """Copy a SQLite file before it is migrated, named after its revision; an interrupted copy leaves none."""
    kept = file.with_name(f"{file.name}.at-{revision}")
    unfinished = kept.with_name(kept.name + ".part")
    unfinished.unlink(missing_ok=True)
    os.close(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    shutil.copymode(file, unfinished)
    driver = connection.connection.driver_connection
    assert driver is not None
    driver.execute("VACUUM INTO ?", (str(unfinished),))
    with unfinished.open("rb") as copy:
        os.fsync(copy.fileno())
    unfinished.replace(kept)
    return kept


def _columns_at(revision: str) -> dict[str, set[str]]:
    """Return the columns of each table at a revision: those of an empty database that is migrated to it."""
    engine = create_engine("sqlite://")
    try:
        with engine.connect() as connection:
            command.upgrade(_config(connection), revision)
            return columns(connection)
    finally:
        engine.dispose()


def known_revisions() -> set[str]:
    return {script.revision for script in _scripts().walk_revisions()}


def _check_whose(connection: Connection, url: URL, before: str | None, scripts: ScriptDirectory) -> None:
    if before is not None and before not in {script.revision for script in scripts.walk_revisions()}:
        raise DatabaseTooNew(
            f"{place(url)} is at revision {before}, which this version does not know: install the later release "
            "of Holdfast that wrote it, or use another database with --db"
        )
    others = [name for name in inspect(connection).get_table_names() if name != "alembic_version"]
    if before is None and others:
        raise NotOurDatabase(
            f"{place(url)} is a database of another program (it has the table {others[0]!r}): name another one "
            "with --db"
        )


@cache
def _scripts() -> ScriptDirectory:
    return ScriptDirectory.from_config(_config())


def _config(connection: Connection | None = None) -> Config:
    """Alembic's configuration; it needs no alembic.ini."""
    configuration = Config()
    configuration.set_main_option("script_location", str(files(__package__)))
    configuration.attributes["connection"] = connection
    return configuration
