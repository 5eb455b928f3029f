"""Units of work, each of which is stored completely or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

from sqlalchemy import text
from sqlalchemy.engine import Engine
from sqlalchemy.exc import OperationalError, SQLAlchemyError
from sqlalchemy.orm import Session

from holdfast_migrations import Upgraded
from holdfast_server.core.request_id import request_id
from holdfast_server.db.statements import Statement, connection_of

T = TypeVar("T")
Work = Callable[[Session], T]

GROUP_UNITS = 64
"""Most units that share one commit, and so one fsync."""


@dataclass(slots=True)
class WriteUnit:
    work: Work[Any]
    job: str | None
    """The job that it is about, whose subscriptions are notified."""
    at_once: bool
    """Whether a user or an agent waits for it, maybe at another instance."""
    samples_only: bool
    """Whether it only adds or merges samples."""
    request_id: str = field(default_factory=request_id)
    """Id of the request that submitted it, outside of which the writer runs it."""
    done: Future[Any] | asyncio.Future[Any] = field(default_factory=Future)
    """For a thread that waits for it, or for a coroutine."""
    result: Any = None
    error: Exception | None = None

    def settle(self) -> None:
        """Set the outcome; in the event loop if a coroutine waits for it."""
        waits = self.done.set_running_or_notify_cancel() if isinstance(self.done, Future) else not self.done.done()
        if not waits:
            return
        if self.error is not None:
            self.done.set_exception(self.error)
        else:
            self.done.set_result(self.result)


class DatabaseBackend(Protocol):
    """Interface of the two kinds of databases: they run units in threads, and report their outcome."""

    place: str
    """Location to be displayed, without a password."""

    def prepare(self) -> Upgraded: ...

    def release(self) -> None: ...

    def open(self, settled: Callable[[list[WriteUnit]], None], *, readers: int) -> Engine:
        """Start to run units, and pass them to `settled` when stored or failed; return the engine for reads.

        Args:
            settled: called in the thread that ran the units.
            readers: number of connections for reads.
        """

    def close(self) -> None:
        """Run the waiting units, and close."""

    @property
    def waiting(self) -> int:
        """Number of units that wait."""

    def submit(self, unit: WriteUnit) -> None: ...

    def unavailable(self, error: Exception) -> bool:
        """Return whether an error means that the database is unavailable."""

    def leads(self) -> bool: ...

    @property
    def writing(self) -> bool:
        """Whether submitted units are run."""


class UnitStatements(NamedTuple):
    """Statements between which a unit runs."""

    begin: Statement
    end: Statement
    undo: Statement


SAVEPOINT = UnitStatements(
    Statement(text("SAVEPOINT unit")),
    Statement(text("RELEASE SAVEPOINT unit")),
    Statement(text("ROLLBACK TO SAVEPOINT unit")),
)


def run_unit(session: Session, unit: WriteUnit, statements: UnitStatements = SAVEPOINT) -> None:
    """Run a unit, alone or behind a savepoint: its error goes to its caller, and the others of the group go on.

    The session takes a savepoint, or another one, at its first use. Most units add samples and do not use it.
    """
    session.info["request_id"] = unit.request_id
    unit.error = None
    connection = connection_of(session)
    statements.begin.run(connection)
    try:
        unit.result = unit.work(session)
        if session.in_transaction():
            session.commit()
            session.close()
        statements.end.run(connection)
    except Exception as error:  # work may raise anything: its caller gets the error
        unit.error = _first(error)
        try:
            session.rollback()
            session.close()
            statements.undo.run(connection)
        except SQLAlchemyError:
            # On a full disk SQLite has rolled back the whole group with its savepoints, and after a lost
            # connection there is nothing to roll back.
            raise unit.error from None
        if unit.error is not error:
            raise unit.error from None


def _first(error: Exception) -> Exception:
    """Return the first of chained errors: the error of a lost savepoint hides its cause."""
    while isinstance(error, OperationalError) and isinstance(error.__context__, OperationalError):
        error = error.__context__
    return error
