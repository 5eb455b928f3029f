"""Statements for SQLite and PostgreSQL, and the errors of the database."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Any, TypeVar, cast

from sqlalchemy import BindParameter, ClauseElement, Connection, String, bindparam, func, select, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError
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


def insert(session: Session | Connection, table: type[models.Base]) -> postgresql.Insert:
    """Return an INSERT with `on_conflict_do_nothing` and `on_conflict_do_update`.

    session.execute(insert(session, models.Project).values(name=…).on_conflict_do_nothing())
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


def lock_job(session: Session, job: str) -> None:
    """Lock a job, on all instances, until the end of the transaction.

    The job need not exist, so that two instances that receive its first reports create it once. SQLite has only
    one writer, and needs no lock. `Database.write(work, job=…)` locks the job before `work` starts.
    """
    if _on_postgres(session):
        session.execute(select(func.pg_advisory_xact_lock(job_key(job))))


def lock_alerts(session: Session) -> None:
    """Lock the groups of alerts and their messages, on all instances, until the end of the transaction.

    A transaction that locks a job as well does so before.
    """
    if _on_postgres(session):
        session.execute(select(func.pg_advisory_xact_lock(lock_key("alerts"))))


def size_bytes(session: Session) -> int:
    """Return the size of the database, with indexes and free pages."""
    return session.scalar(text(size_question(session.get_bind().dialect.name))) or 0


def size_question(dialect: str) -> str:
    if dialect == "postgresql":
        return "SELECT pg_database_size(current_database())"
    return "SELECT page_count * page_size FROM pragma_page_count(), pragma_page_size()"


def require_writable(session: Session) -> None:
    """Write a row as it is, which fails on a full disk.

    Raises:
        DatabaseUnavailable: a PostgreSQL server is read-only, such as a standby.
    """
    if _on_postgres(session) and session.scalar(text("SHOW transaction_read_only")) == "on":
        raise DatabaseUnavailable("the database is read-only: it is a standby, or was set to read-only")
    session.execute(text("UPDATE alembic_version SET version_num = version_num"))


def job_key(job: str | None) -> int:
    """Return the lock number of a job; None: of all writes about no job, which are rare."""
    return lock_key("no job" if job is None else f"job {job}")


def lock_key(name: str) -> int:
    """Return the 64-bit number of a named advisory lock of PostgreSQL, unique in the database."""
    return int.from_bytes(blake2b(f"holdfast {name}".encode(), digest_size=8).digest(), signed=True)


def _on_postgres(session: Session | Connection) -> bool:
    dialect = session.dialect if isinstance(session, Connection) else session.get_bind().dialect
    return dialect.name == "postgresql"


def on_connection(session: Session, function: Callable[..., R], *arguments: Any, **named: Any) -> R:
    """Call a function with the connection of a unit's session, to run compiled statements without the ORM."""
    return function(connection_of(session), *arguments, **named)


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
        self._compiled: dict[str, _Compiled] = {}

    def all(self, connection: Connection, parameters: Parameters) -> list[Any]:
        compiled = self._for(connection)
        cursor = connection.connection.cursor()
        try:
            cursor.execute(compiled.text, compiled.values(parameters))
            return list(cursor.fetchall())
        except connection.dialect.loaded_dbapi.Error as error:
            raise _as_ours(connection, compiled.text, error) from error
        finally:
            cursor.close()

    def first(self, connection: Connection, parameters: Parameters) -> Any:
        rows = self.all(connection, parameters)
        return rows[0] if rows else None

    def run(self, connection: Connection, *parameters: Parameters) -> None:
        """Run the statement for each set of parameters, or once without any."""
        compiled = self._for(connection)
        rows = [compiled.values(each) for each in parameters or ({},)]
        cursor = connection.connection.cursor()
        try:
            if len(rows) == 1:
                cursor.execute(compiled.text, rows[0])
            else:
                cursor.executemany(compiled.text, rows)
        except connection.dialect.loaded_dbapi.Error as error:
            raise _as_ours(connection, compiled.text, error) from error
        finally:
            cursor.close()

    def _for(self, connection: Connection) -> _Compiled:
        dialect = connection.dialect
        compiled = self._compiled.get(dialect.name)
        if compiled is None:
            made = self._make(connection) if callable(self._make) else self._make
            compiled = self._compiled[dialect.name] = _Compiled(made.compile(dialect=dialect))
        return compiled


class _Compiled:
    """A statement in the words of one driver, which takes its parameters by position or by name."""

    def __init__(self, compiled: Any) -> None:
        self.text = str(compiled)
        self._order: list[str] | None = compiled.positiontup
        self._constants = {name: value for name, value in compiled.params.items() if value is not None}

    def values(self, parameters: Parameters) -> Any:
        whole = {**self._constants, **parameters} if self._constants else parameters
        return whole if self._order is None else tuple([whole[name] for name in self._order])


def _as_ours(connection: Connection, text: str, error: Any) -> BaseException:
    """Wrap an error of the driver as SQLAlchemy does, so that callers handle one kind of errors."""
    dialect = connection.dialect
    lost = dialect.is_disconnect(error, connection.connection.dbapi_connection, None)
    base = dialect.loaded_dbapi.Error
    made: BaseException = DBAPIError.instance(
        text, None, error, base, connection_invalidated=lost, dialect=dialect
    )
    return made
