"""The database's history, run by the server on start."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from sqlalchemy import URL, Connection, inspect, text

from holdfast_migrations.connections import CannotStore as CannotStore
from holdfast_migrations.connections import DatabaseTooNew as DatabaseTooNew
from holdfast_migrations.connections import DriverMissing as DriverMissing
from holdfast_migrations.connections import NotOurDatabase as NotOurDatabase
from holdfast_migrations.connections import connected


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
        if revision == "head" and _is_up_to_date(connection):
            return Upgraded([])
        from holdfast_migrations import history

        return Upgraded(*history.upgrade(connection, url, revision))


def downgrade(url: URL, revision: str) -> None:
    """Take the database back to an earlier revision, or to `base`."""
    from holdfast_migrations import history

    with connected(url) as connection:
        history.downgrade(connection, revision)


def current(url: URL) -> str | None:
    """The revision that a database is at; None for an empty one."""
    from holdfast_migrations import history

    with connected(url) as connection, connection.begin():
        return history.current(connection)


def known_revisions() -> set[str]:
    """All that this version knows of."""
    from holdfast_migrations import history

    return history.known_revisions()


def check(url: URL) -> None:
    """Raises when the tables and the models differ. Indexes on expressions cannot be told from SQLite's tables."""
    from holdfast_migrations import history

    with connected(url) as connection, connection.begin():
        history.check(connection)


def _is_up_to_date(connection: Connection) -> bool:
    """A start as most are: whoever waits for a server that was killed does not wait for Alembic as well."""
    with connection.begin():
        if not inspect(connection).has_table("alembic_version"):
            return False
        found = connection.execute(text("SELECT version_num FROM alembic_version")).scalars().all()
    return found == [_newest()]


def _newest() -> str:
    """The last revision, whose number its file begins with."""
    names = (each.name for each in files(__package__).joinpath("versions").iterdir())
    return max(number for name in names if (number := name.partition("_")[0]).isdigit())
