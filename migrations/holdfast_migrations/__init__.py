"""The database's history, run by the server on start."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import URL, Connection, inspect

from holdfast_migrations import backup
from holdfast_migrations.connections import connected, patiently, place
from holdfast_migrations.errors import CannotStore as CannotStore
from holdfast_migrations.errors import DatabaseTooNew as DatabaseTooNew
from holdfast_migrations.errors import DriverMissing as DriverMissing
from holdfast_migrations.errors import NotOurDatabase as NotOurDatabase


@dataclass(frozen=True, slots=True)
class Upgraded:
    """What was done to bring a database up to date."""

    revisions: list[str]
    """Those applied, oldest first."""
    backup: Path | None = None
    """The SQLite file as it was."""


def upgrade(url: URL, revision: str = "head") -> Upgraded:
    """Bring the database up to date, while other servers go on using it.

    Raises:
        DatabaseTooNew, NotOurDatabase.
        CannotStore: there is no such PostgreSQL, or no way into it.
    """
    with connected(url) as connection:
        scripts = _scripts()
        with connection.begin():
            before = _current(connection)
            _check_whose(connection, url, before, scripts)
        missing = [script.revision for script in scripts.iterate_revisions(revision, before or "base")]
        if not missing:
            return Upgraded([])
        kept = None
        if before is not None and connection.dialect.name == "sqlite":
            kept = backup.keep(connection, Path(str(url.database)), before)
        patiently(connection, lambda: command.upgrade(_config(connection), revision))
        return Upgraded(missing[::-1], kept)


def downgrade(url: URL, revision: str) -> None:
    """Take the database back to an earlier revision, or to `base`."""
    with connected(url) as connection:
        patiently(connection, lambda: command.downgrade(_config(connection), revision))


def current(url: URL) -> str | None:
    """The revision that a database is at; None for an empty one."""
    with connected(url) as connection, connection.begin():
        return _current(connection)


def known_revisions() -> set[str]:
    """All that this version knows of."""
    return {script.revision for script in _scripts().walk_revisions()}


def check(url: URL) -> None:
    """Raises when the tables and the models differ. Indexes on expressions cannot be told from SQLite's tables."""
    with warnings.catch_warnings(), connected(url) as connection, connection.begin():
        warnings.filterwarnings("ignore", ".*expression-based index")
        command.check(_config(connection))


def _check_whose(connection: Connection, url: URL, before: str | None, scripts: ScriptDirectory) -> None:
    if before is not None and before not in {script.revision for script in scripts.walk_revisions()}:
        raise DatabaseTooNew(
            f"{place(url)} is at revision {before}, which this version does not know: it belongs to a later "
            "release of Holdfast; install that one, or start with another --db"
        )
    others = [name for name in inspect(connection).get_table_names() if name != "alembic_version"]
    if before is None and others:
        raise NotOurDatabase(
            f"{place(url)} is a database of another program (it has the table {others[0]!r}): "
            "name one of its own with --db"
        )


def _current(connection: Connection) -> str | None:
    return MigrationContext.configure(connection).get_current_revision()


@cache
def _scripts() -> ScriptDirectory:
    return ScriptDirectory.from_config(_config())


def _config(connection: Connection | None = None) -> Config:
    """Alembic's configuration; it needs no alembic.ini."""
    configuration = Config()
    configuration.set_main_option("script_location", str(files(__package__)))
    configuration.attributes["connection"] = connection
    return configuration
