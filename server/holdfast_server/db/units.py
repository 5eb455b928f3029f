"""Units of work to store, each of them whole or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from sqlalchemy import text
from sqlalchemy.exc import OperationalError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

from holdfast_migrations import Upgraded
from holdfast_server.core.request_id import request_id
from holdfast_server.db.statements import Statement, connection_of

T = TypeVar("T")
Work = Callable[[AsyncSession], Awaitable[T]]

GROUP_UNITS = 64
"""Most units that share one commit, and with it one fsync."""


@dataclass(slots=True)
class Unit:
    work: Work[Any]
    job: str | None
    """The one it is about; its listeners are told."""
    at_once: bool
    """A person or an agent waits for it, maybe at another instance."""
    samples_only: bool
    """It adds or packs samples and changes nothing else."""
    request_id: str = field(default_factory=request_id)
    """Of the request that handed it in: it is run outside of that, by the writer."""
    done: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    result: Any = None
    error: Exception | None = None

    def settle(self) -> None:
        if self.done.cancelled():
            return
        if self.error is not None:
            self.done.set_exception(self.error)
        else:
            self.done.set_result(self.result)


class Store(Protocol):
    """What `Database` asks of a kind of database. It begins units and tells what became of them; who may read,
    and for how long, is the same for all kinds."""

    place: str
    """Where it stores, to be shown: without a password."""

    def prepare(self) -> Upgraded: ...

    def release(self) -> None: ...

    async def open(self, settled: Callable[[list[Unit]], None]) -> AsyncEngine:
        """Begin to take in units, which go to `settled` when they are stored or have failed; the engine reads."""

    async def close(self) -> None:
        """Store what waits."""

    @property
    def waiting(self) -> int:
        """Units that are not begun yet."""

    def submit(self, unit: Unit) -> None: ...

    def unavailable(self, error: Exception) -> bool:
        """Whether an error says that the database is out of reach, and nothing of what was asked."""

    async def leads(self) -> bool: ...

    @property
    def writing(self) -> bool:
        """Whether units that are submitted are stored."""


async def attempt(session: AsyncSession, unit: Unit) -> None:
    """Run a unit behind a savepoint: its error is its caller's, and the others in the group go on.

    The session takes a savepoint of its own at its first use; most units add samples and do not use it.
    """
    session.info["request_id"] = unit.request_id
    unit.error = None
    await session.run_sync(_begin)
    try:
        unit.result = await unit.work(session)
        await session.run_sync(_end)
    except Exception as error:  # work may raise anything: it is for whoever handed the work in
        unit.error = _first(error)
        try:
            await session.run_sync(_take_back)
        except SQLAlchemyError:
            # On a full disk SQLite has taken back the whole group, and its savepoints with it; and where the
            # connection is lost, nothing is left to be taken back.
            raise unit.error from None
        if unit.error is not error:
            raise unit.error from None
    finally:
        with suppress(SQLAlchemyError):
            await session.run_sync(Session.close)


def _begin(session: Session) -> None:
    _SAVEPOINT.run(connection_of(session))


def _end(session: Session) -> None:
    if session.in_transaction():
        session.commit()
    _RELEASE.run(connection_of(session))


def _take_back(session: Session) -> None:
    session.rollback()
    _ROLLBACK.run(connection_of(session))


_SAVEPOINT, _RELEASE = Statement(text("SAVEPOINT unit")), Statement(text("RELEASE SAVEPOINT unit"))
_ROLLBACK = Statement(text("ROLLBACK TO SAVEPOINT unit"))


def _first(error: Exception) -> Exception:
    """What went wrong first: a savepoint that is gone by the time of the roll-back hides why it is gone."""
    while isinstance(error, OperationalError) and isinstance(error.__context__, OperationalError):
        error = error.__context__
    return error
