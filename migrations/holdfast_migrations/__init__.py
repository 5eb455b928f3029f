"""Migrations of the database, which the server runs on start."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from sqlalchemy import URL, Connection, inspect, text

from holdfast_migrations.connections import CannotStore as CannotStore
from holdfast_migrations.connections import DatabaseTooNew as DatabaseTooNew
from holdfast_migrations.connections import DriverMissing as DriverMissing
from holdfast_migrations.connections import NotOurDatabase as NotOurDatabase
from holdfast_migrations.connections import connected, require_columns


@dataclass(frozen=True, slots=True)
class Upgraded:
    """Result of an upgrade."""

    revisions: list[str]
    """Applied revisions, oldest first."""
    backup: Path | None = None
    """Copy of the SQLite file before the upgrade."""


def upgrade(url: URL, revision: str = "head") -> Upgraded:
    """Upgrade the database, while other servers continue to use it.

    Raises:
        DatabaseTooNew, NotOurDatabase.
        CannotStore: the PostgreSQL database does not exist, or refuses access.
    """
    with connected(url) as connection:
        if revision == "head" and _is_up_to_date(connection):
            return Upgraded([])
        from holdfast_migrations import history

        return Upgraded(*history.upgrade(connection, url, revision))


def require_tables(url: URL, wanted: Mapping[str, Collection[str]]) -> None:
    """Raise NotOurDatabase unless a database of the newest revision has the tables and columns of `wanted`."""
    with connected(url) as connection, connection.begin():
        require_columns(connection, url, _newest(), wanted)


def known_revisions() -> set[str]:
    """Return all revisions that this version knows."""
    from holdfast_migrations import history

    return history.known_revisions()


def _is_up_to_date(connection: Connection) -> bool:
    """Return whether no upgrade is needed, without importing Alembic, to start faster."""
    with connection.begin():
        if not inspect(connection).has_table("alembic_version"):
            return False
        found = connection.execute(text("SELECT version_num FROM alembic_version")).scalars().all()
    return found == [_newest()]


def _newest() -> str:
    """Return the newest revision, from the names of the files."""
    names = (each.name for each in files(__package__).joinpath("versions").iterdir())
    return max(number for name in names if (number := name.partition("_")[0]).isdigit())
