"""What is handed in to be stored: units, each of them whole or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from sqlalchemy import Connection, text
from sqlalchemy.exc import OperationalError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession

from holdfast_migrations import Upgraded
from holdfast_server.db.rows import Statement
from holdfast_server.requests import request_id

T = TypeVar("T")
Work = Callable[[AsyncSession], Awaitable[T]]
RowWork = Callable[[Connection], T]
"""What takes in samples, or packs them, and changes nothing else. Synchronous, and quicker: on SQLite a whole
group of it runs in one thread, with no hop for each statement."""

GROUP_UNITS = 64
"""Most units that share one commit, and with it one fsync."""


@dataclass(slots=True)
class Unit:
    work: Work[Any]
    job: str | None
    """The one it is about; its listeners are told."""
    at_once: bool
    """Somebody waits for it, maybe at another instance."""
    rows: RowWork[Any] | None = None
    """The same as `work`, where it can be done without a session."""
    request_id: str = field(default_factory=request_id)
    """Of the request that handed it in: it is run outside of that, by the writer."""
    done: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    result: Any = None
    error: Exception | None = None

    @property
    def samples_only(self) -> bool:
        return self.rows is not None

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


async def attempt(connection: AsyncConnection, unit: Unit) -> None:
    """Run a unit behind a savepoint: its error is its caller's, and the others in the group go on."""
    session = AsyncSession(connection, join_transaction_mode="create_savepoint", expire_on_commit=False)
    session.info["request_id"] = unit.request_id
    unit.error = None
    try:
        unit.result = await unit.work(session)
        await session.commit()
    except Exception as error:  # work may raise anything: it is for whoever handed the work in
        unit.error = _first(error)
        try:
            await session.rollback()
        except SQLAlchemyError:
            # On a full disk SQLite has taken back the whole group, and its savepoints with it; and where the
            # connection is lost, nothing is left to be taken back.
            raise unit.error from None
        if unit.error is not error:
            raise unit.error from None
    finally:
        with suppress(SQLAlchemyError):
            await session.close()


def attempt_rows(connection: Connection, unit: Unit) -> None:
    """The same for what needs no session."""
    assert unit.rows is not None
    unit.error = None
    _SAVEPOINT.run(connection, {})
    try:
        unit.result = unit.rows(connection)
        _RELEASE.run(connection, {})
    except Exception as error:  # as above
        unit.error = error
        try:
            _ROLLBACK.run(connection, {})
        except SQLAlchemyError:
            raise unit.error from None


_SAVEPOINT, _RELEASE = Statement(text("SAVEPOINT unit")), Statement(text("RELEASE unit"))
_ROLLBACK = Statement(text("ROLLBACK TO unit"))


def _first(error: Exception) -> Exception:
    """What went wrong first: a savepoint that is gone by the time of the roll-back hides why it is gone."""
    while isinstance(error, OperationalError) and isinstance(error.__context__, OperationalError):
        error = error.__context__
    return error
