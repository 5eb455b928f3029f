"""Statements in one spelling for SQLite and PostgreSQL, and the reasons why something is not stored."""

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
    """Another server has this file open."""


class DatabaseClosed(RuntimeError):
    """The server is stopping: nothing more is stored."""


class DatabaseBusy(RuntimeError):
    """More waits to be written than the database keeps up with: come back later."""


class DatabaseUnavailable(RuntimeError):
    """The database does not answer, or broke off: what was to be stored may not be."""


def insert(session: AsyncSession | Connection, table: type[models.Base]) -> postgresql.Insert:
    """An INSERT that can be given `on_conflict_do_nothing` or `on_conflict_do_update`.

    await session.execute(insert(session, models.Project).values(name=…).on_conflict_do_nothing())
    """
    if _on_postgres(session):
        return postgresql.insert(table)
    made: Any = sqlite.insert(table)  # it has the same methods, and no common type says so
    return made  # type: ignore[no-any-return]


def named_jobs() -> BindParameter[Any]:
    """In a question that is put together once, the jobs that `{"jobs": names}` names each time that it is asked.

    To put a question together takes longer than SQLite needs to answer it for a job.
    """
    return bindparam("jobs", expanding=True, type_=String())


async def lock_job(session: AsyncSession, job: str) -> None:
    """From here to the end of the transaction, no other unit that locks this job runs, on any instance.

    A job need not exist to be locked, so that two instances that hear of it first make it once. On SQLite there
    is one writer anyway. `Database.write(work, job=…)` has locked the job already when `work` begins.
    """
    if _on_postgres(session):
        await session.execute(select(func.pg_advisory_xact_lock(job_key(job))))


async def locked_job(session: AsyncSession, job: str) -> models.JobRecord | None:
    """The row of a job, as it is once it is locked; None for a job that nobody has heard of."""
    await lock_job(session, job)
    return await session.get(models.JobRecord, job, populate_existing=True)


async def size_bytes(session: AsyncSession) -> int:
    """All that is stored, tables, indexes and what is free in between."""
    return await session.scalar(text(size_question(session.get_bind().dialect.name))) or 0


def size_question(dialect: str) -> str:
    if dialect == "postgresql":
        return "SELECT pg_database_size(current_database())"
    return "SELECT page_count * page_size FROM pragma_page_count(), pragma_page_size()"


async def require_writable(session: AsyncSession) -> None:
    """DatabaseUnavailable for a PostgreSQL that only reads, as a standby. On SQLite who writes has the lock."""
    if _on_postgres(session) and await session.scalar(text("SHOW transaction_read_only")) == "on":
        raise DatabaseUnavailable("it can be read and not be written: it is a standby, or was made read-only")


def job_key(job: str | None) -> int:
    """None: of all that is about no job. People, keys and rules change rarely, and one after the other."""
    return lock_key("no job" if job is None else f"job {job}")


def lock_key(name: str) -> int:
    """A name among PostgreSQL's advisory locks, which go by 64-bit numbers and are shared by a whole database."""
    return int.from_bytes(blake2b(f"holdfast {name}".encode(), digest_size=8).digest(), signed=True)


def _on_postgres(session: AsyncSession | Connection) -> bool:
    dialect = session.dialect if isinstance(session, Connection) else session.get_bind().dialect
    return dialect.name == "postgresql"


async def on_connection(session: AsyncSession, function: Callable[..., R], *arguments: Any, **named: Any) -> R:
    """Call a function with the connection of a unit's session, for compiled statements, which need no ORM."""
    return await session.run_sync(lambda sync: function(connection_of(sync), *arguments, **named))


def connection_of(session: Session) -> Connection:
    """Of a unit's session, which is bound to one, and not to an engine."""
    return cast("Connection", session.get_bind())


class Statement:
    """A statement that is compiled once and run by the driver's own cursor.

    SQLAlchemy's way from a statement to the driver takes some thirty times as long as SQLite needs to run it, and
    a batch of samples needs a dozen. Bound parameters are given by name; rows come as tuples.

    `make` is given a connection for its dialect, where the two differ.
    """

    def __init__(self, make: ClauseElement | Callable[[Connection], ClauseElement]) -> None:
        self._make = make
        self._compiled: dict[str, tuple[str, list[str], dict[str, Any]]] = {}

    def all(self, connection: Connection, parameters: Parameters) -> list[Any]:
        text, order, constants = self._for(connection)
        values = {**constants, **parameters}
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
        """Once for each set of parameters; once where there is none."""
        text, order, constants = self._for(connection)
        whole = [{**constants, **each} for each in parameters or ({},)]
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
    """As SQLAlchemy would raise it, so that whoever handles errors of the database need not tell them apart."""
    dialect = connection.dialect
    lost = dialect.is_disconnect(error, connection.connection.dbapi_connection, None)
    base = dialect.loaded_dbapi.Error
    made: BaseException = DBAPIError.instance(
        text, None, error, base, connection_invalidated=lost, dialect=dialect
    )
    return made
