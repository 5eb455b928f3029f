"""Statements for SQLite and PostgreSQL, and the errors of the database."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Any, TypeVar, cast

from sqlalchemy import BindParameter, ClauseElement, Connection, String, bindparam, func, select, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from holdfast_server import models

Parameters = Mapping[str, Any]
R = TypeVar("R")


class DatabaseInUse(RuntimeError):
    """Another server uses this file."""


class DatabaseClosed(RuntimeError):
    """The server is stopping and stores nothing more."""


class DatabaseBusy(RuntimeError):
    """Too many writes wait for the database: retry later."""


class DatabaseUnavailable(RuntimeError):
    """The database does not answer, or the connection was lost: changes may not be stored."""


def insert(session: AsyncSession | Connection, table: type[models.Base]) -> postgresql.Insert:
    """Return an INSERT with `on_conflict_do_nothing` and `on_conflict_do_update`.

    await session.execute(insert(session, models.Project).values(name=…).on_conflict_do_nothing())
    """
    if _on_postgres(session):
        return postgresql.insert(table)
    made: Any = sqlite.insert(table)  # it has the same methods, but no common type
    return made  # type: ignore[no-any-return]


def named_jobs() -> BindParameter[Any]:
    """Return the parameter `jobs` of a query that is built once, a list of names.

    Building a query takes longer than running it for a job on SQLite.
    """
    return bindparam("jobs", expanding=True, type_=String())


async def lock_job(session: AsyncSession, job: str) -> None:
    """Lock a job, on all instances, until the end of the transaction.

    The job need not exist, so that two instances that receive its first reports create it once. SQLite has only
    one writer, and needs no lock. `Database.write(work, job=…)` locks the job before `work` starts.
    """
    if _on_postgres(session):
        await session.execute(select(func.pg_advisory_xact_lock(job_key(job))))


async def size_bytes(session: AsyncSession) -> int:
    """Return the size of the database, with indexes and free pages."""
    return await session.scalar(text(size_question(session.get_bind().dialect.name))) or 0


def size_question(dialect: str) -> str:
    if dialect == "postgresql":
        return "SELECT pg_database_size(current_database())"
    return "SELECT page_count * page_size FROM pragma_page_count(), pragma_page_size()"


async def require_writable(session: AsyncSession) -> None:
    """Write a row as it is, which fails on a full disk.

    Raises:
        DatabaseUnavailable: a PostgreSQL server is read-only, such as a standby.
    """
    if _on_postgres(session) and await session.scalar(text("SHOW transaction_read_only")) == "on":
        raise DatabaseUnavailable("the database is read-only: it is a standby, or was set to read-only")
    await session.execute(text("UPDATE alembic_version SET version_num = version_num"))


def job_key(job: str | None) -> int:
    """Return the lock number of a job; None: of all writes about no job, which are rare."""
    return lock_key("no job" if job is None else f"job {job}")


def lock_key(name: str) -> int:
    """Return the 64-bit number of a named advisory lock of PostgreSQL, unique in the database."""
    return int.from_bytes(blake2b(f"holdfast {name}".encode(), digest_size=8).digest(), signed=True)


def _on_postgres(session: AsyncSession | Connection) -> bool:
    dialect = session.dialect if isinstance(session, Connection) else session.get_bind().dialect
    return dialect.name == "postgresql"


async def on_connection(session: AsyncSession, function: Callable[..., R], *arguments: Any, **named: Any) -> R:
    """Call a function with the connection of a unit's session, to run compiled statements without the ORM."""
    return await session.run_sync(lambda sync: function(connection_of(sync), *arguments, **named))


def connection_of(session: Session) -> Connection:
    """Return the connection of a unit's session, which is not bound to an engine."""
    return cast("Connection", session.bind)


class Statement:
    """A statement that is compiled once and run by the driver's cursor.

    SQLAlchemy takes about thirty times as long to execute a statement as SQLite does, and a batch of samples needs
    a dozen. Parameters are passed by name; rows are tuples.

    `make` is a statement, or a function of a connection that builds it for the connection's dialect.
    """

    def __init__(self, make: ClauseElement | Callable[[Connection], ClauseElement]) -> None:
        self._make = make
        self._compiled: dict[str, tuple[str, list[str], dict[str, Any]]] = {}

    def all(self, connection: Connection, parameters: Parameters) -> list[Any]:
        text, order, constants = self._for(connection)
        values = {**constants, **parameters} if constants else parameters
        cursor = connection.connection.cursor()
        try:
            cursor.execute(text, tuple([values[name] for name in order]))
            return list(cursor.fetchall())
        except connection.dialect.loaded_dbapi.Error as error:
            raise _as_ours(connection, text, error) from error
        finally:
            cursor.close()

    def first(self, connection: Connection, parameters: Parameters) -> Any:
        rows = self.all(connection, parameters)
        return rows[0] if rows else None

    def run(self, connection: Connection, *parameters: Parameters) -> None:
        """Run the statement for each set of parameters, or once without any."""
        text, order, constants = self._for(connection)
        whole = [{**constants, **each} for each in parameters or ({},)] if constants else parameters or ({},)
        rows = [tuple([values[name] for name in order]) for values in whole]
        cursor = connection.connection.cursor()
        try:
            if len(rows) == 1:
                cursor.execute(text, rows[0])
            else:
                cursor.executemany(text, rows)
        except connection.dialect.loaded_dbapi.Error as error:
            raise _as_ours(connection, text, error) from error
        finally:
            cursor.close()

    def _for(self, connection: Connection) -> tuple[str, list[str], dict[str, Any]]:
        dialect = connection.dialect
        if dialect.name not in self._compiled:
            made = self._make(connection) if callable(self._make) else self._make
            compiled: Any = made.compile(dialect=dialect)
            constants = {name: value for name, value in compiled.params.items() if value is not None}
            self._compiled[dialect.name] = (str(compiled), list(compiled.positiontup or ()), constants)
        return self._compiled[dialect.name]


def _as_ours(connection: Connection, text: str, error: Any) -> BaseException:
    """Wrap an error of the driver as SQLAlchemy does, so that callers handle one kind of errors."""
    dialect = connection.dialect
    lost = dialect.is_disconnect(error, connection.connection.dbapi_connection, None)
    base = dialect.loaded_dbapi.Error
    made: BaseException = DBAPIError.instance(
        text, None, error, base, connection_invalidated=lost, dialect=dialect
    )
    return made
