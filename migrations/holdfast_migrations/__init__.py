"""The database's history, run by the server on start."""

from __future__ import annotations

from importlib.resources import files

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import URL, create_engine, inspect


class DatabaseTooNew(RuntimeError):
    """A later release of Holdfast has migrated this database."""


class NotOurDatabase(RuntimeError):
    """The file holds something else."""


def config(url: URL) -> Config:
    """Alembic's configuration for a database; it needs no alembic.ini."""
    configuration = Config()
    configuration.set_main_option("script_location", str(files(__package__)))
    configuration.attributes["url"] = synchronous(url)
    return configuration


def upgrade(url: URL, revision: str = "head") -> list[str]:
    """Bring the database up to date; returns the revisions applied, oldest first."""
    configuration = config(url)
    scripts = ScriptDirectory.from_config(configuration)
    before = current(url)
    if before is not None and before not in {script.revision for script in scripts.walk_revisions()}:
        raise DatabaseTooNew(
            f"{url.database} is at revision {before}, which this version does not know: it belongs to a later "
            "release of Holdfast; install that one, or start with another --db"
        )
    if before is None and (others := tables(url)):
        raise NotOurDatabase(
            f"{url.database} is a database of another program (it has the table {others[0]!r}): "
            "name a file of its own with --db"
        )
    missing = [script.revision for script in scripts.iterate_revisions(revision, before or "base")]
    if missing:
        command.upgrade(configuration, revision)
    return missing[::-1]


def downgrade(url: URL, revision: str) -> None:
    """Take the database back to an earlier revision, or to `base`."""
    command.downgrade(config(url), revision)


def current(url: URL) -> str | None:
    """The revision that a database is at; None for an empty one."""
    engine = create_engine(synchronous(url))
    try:
        with engine.connect() as connection:
            return MigrationContext.configure(connection).get_current_revision()
    finally:
        engine.dispose()


def tables(url: URL) -> list[str]:
    engine = create_engine(synchronous(url))
    try:
        return [name for name in inspect(engine).get_table_names() if name != "alembic_version"]
    finally:
        engine.dispose()


def check(url: URL) -> None:
    """Raises when the tables and the models differ."""
    command.check(config(url))


def synchronous(url: URL) -> URL:
    """The same database through the driver of the standard library: migrations need no event loop."""
    return url.set(drivername=url.get_backend_name())
