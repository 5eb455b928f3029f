"""Connections for migrations, and the errors of databases that cannot be used."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager

from sqlalchemy import URL, create_engine, event, inspect, text
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.pool import ConnectionPoolEntry, NullPool

OLDEST_POSTGRES = 14
CONNECT_SECONDS = 10
OTHERS_SECONDS = 60
"""Timeout for another instance that migrates the same database."""
LOCK_SECONDS = 2
"""Timeout of a migration for the lock of a table; writers behind it then proceed, and it tries again."""
LOCK_TRIES = 30
_LOCK_NOT_AVAILABLE = "55P03"

_ADVICE = {
    "password": "give the correct password in the URL, in PGPASSWORD or in ~/.pgpass",
    "pg_hba.conf": "allow this machine and user in pg_hba.conf",
    "role ": "create the user with createuser, or name another",
    "database ": "create it with createdb, or name another",
    "refused": "start PostgreSQL there, or correct the host and port",
    "No such file": "start PostgreSQL there, or correct the host and port",
    "timeout": "check that this machine can reach it, or correct the host and port",
    "resolve": "correct the host",
    "translate": "correct the host",
    "permission denied": "make the user the owner of the database: ALTER DATABASE … OWNER TO …",
    "read-only": "this is a replica: name the primary server",
}
"""Advice by parts of the English messages of the server and its library; other messages get none."""


class DatabaseTooNew(RuntimeError):
    """A later release of Holdfast has migrated this database."""


class NotOurDatabase(RuntimeError):
    """The database or file is not a Holdfast database."""


class CannotStore(RuntimeError):
    """The database cannot be used; the message says why, and what to do."""


class DriverMissing(CannotStore):
    """The optional libraries for PostgreSQL are not installed."""

    def __init__(self, error: ModuleNotFoundError) -> None:
        super().__init__(f"storing in PostgreSQL needs {error.name}: install Holdfast with its extra `postgres`")


@contextmanager
def connected(url: URL) -> Iterator[Connection]:
    """Open a connection for migrations, which no other instance has at the same time.

    Raises:
        CannotStore: PostgreSQL cannot be reached or used.
    """
    if url.get_backend_name() == "sqlite":
        engine = _sqlite(url)
        try:
            with engine.connect() as connection:
                yield connection
        finally:
            engine.dispose()
        return
    try:
        with _postgres(url).connect() as connection:
            _fit(connection, url)
            _alone(connection, url)
            yield connection
    except DBAPIError as error:
        raise CannotStore(_sentence(url, error)) from error


def place(url: URL) -> str:
    """Return the path of the database, or its URL without the password, to be displayed."""
    if url.get_backend_name() == "sqlite":
        return str(url.database)
    return url.set(drivername="postgresql").render_as_string(hide_password=True)


def columns(connection: Connection) -> dict[str, set[str]]:
    """Return the names of the columns of each table."""
    found = inspect(connection).get_multi_columns()
    return {table: {column["name"] for column in listed} for (_, table), listed in found.items()}


def require_columns(
    connection: Connection, url: URL, revision: str, wanted: Mapping[str, Collection[str]]
) -> None:
    """Raise NotOurDatabase where a database says that it has a revision, and lacks a table or column of it."""
    found = columns(connection)
    for table, names in wanted.items():
        missing = sorted(set(names) - found.get(table, set()))
        if missing:
            lacks = f"column {missing[0]!r} of table {table!r}" if table in found else f"table {table!r}"
            raise NotOurDatabase(
                f"{place(url)} says that it is at revision {revision}, but lacks the {lacks}: it was written by "
                "another program, or by Holdfast before its first release. It is left as it is; name another one "
                "with --db"
            )


def patiently(connection: Connection, change: Callable[[], object]) -> None:
    """Run `change` in a transaction, which waits only briefly for locks so that it does not block others."""
    if connection.dialect.name == "sqlite":
        with connection.begin():
            change()
        return
    for number in range(LOCK_TRIES):
        try:
            with connection.begin():
                connection.execute(text(f"SET LOCAL lock_timeout = '{LOCK_SECONDS}s'"))
                change()
                return
        except OperationalError as error:
            if _state(error) != _LOCK_NOT_AVAILABLE or number == LOCK_TRIES - 1:
                raise
        time.sleep(random.uniform(0.1, 1.0))  # noqa: S311


def _sqlite(url: URL) -> Engine:
    engine = create_engine(url.set(drivername="sqlite"))

    @event.listens_for(engine, "connect")
    def configure(connection: DBAPIConnection, _: ConnectionPoolEntry) -> None:
        connection.isolation_level = None

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # the driver's own transactions do not include changes of tables
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    return engine


def _postgres(url: URL) -> Engine:
    try:
        return create_engine(
            url.set(drivername="postgresql+psycopg"),
            poolclass=NullPool,
            connect_args={"connect_timeout": CONNECT_SECONDS, "application_name": "holdfast migrations"},
        )
    except ModuleNotFoundError as error:
        raise DriverMissing(error) from None


def _fit(connection: Connection, url: URL) -> None:
    with connection.begin():
        version = int(connection.scalar(text("SHOW server_version_num")) or 0) // 10_000
        encoding = connection.scalar(text("SHOW server_encoding"))
    if version < OLDEST_POSTGRES:
        raise CannotStore(
            f"cannot store in {place(url)}: it is PostgreSQL {version}; use {OLDEST_POSTGRES} or later"
        )
    if encoding != "UTF8":
        raise CannotStore(
            f"cannot store in {place(url)}: its encoding is {encoding}; create one with createdb --encoding UTF8 "
            "--template template0"
        )


def _alone(connection: Connection, url: URL) -> None:
    """Lock the migrations until the connection closes: instances that start together migrate in turn."""
    try:
        with connection.begin():
            connection.execute(text(f"SET LOCAL lock_timeout = '{OTHERS_SECONDS}s'"))
            connection.execute(text("SELECT pg_advisory_lock(hashtext('holdfast migrations'))"))
    except OperationalError as error:
        if _state(error) != _LOCK_NOT_AVAILABLE:
            raise
        raise CannotStore(
            f"another server has been migrating {place(url)} for more than {OTHERS_SECONDS} s: start this one "
            "again when it has finished"
        ) from None


def _sentence(url: URL, error: DBAPIError) -> str:
    said = str(error.orig).strip()
    # keep the error of the last address tried, without the library's own advice
    reason = said.rpartition("FATAL:")[2].strip().partition("\n")[0]
    reason = reason.rpartition(" failed: ")[2].strip().rstrip(".")
    advice = next((f": {advice}" for words, advice in _ADVICE.items() if words in reason), "")
    return f"cannot store in {place(url)} ({reason}){advice}"


def _state(error: DBAPIError) -> str | None:
    state: str | None = getattr(error.orig, "sqlstate", None)
    return state
