"""SQLite from the event loop with one trip to a connection's thread for a statement.

aiosqlite makes a trip for each of a cursor, its statement, its rows and its end. A page asks some twenty
questions, and what a trip takes is more than what SQLite needs for most of the answers.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from typing import Any

import aiosqlite
from sqlalchemy.engine import URL
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

ITERATED_ROWS = 64
"""What aiosqlite fetches at a time when rows are iterated over, which nobody does here."""


def async_engine(url: URL, **options: Any) -> AsyncEngine:
    path = str(url.database)

    async def connected() -> aiosqlite.Connection:
        connection = Connection(lambda: sqlite3.connect(path, check_same_thread=False), ITERATED_ROWS)
        connection._thread.daemon = True  # as SQLAlchemy has it: one that hangs does not keep the process
        return await connection

    return create_async_engine(url, async_creator=connected, **options)


class Connection(aiosqlite.Connection):
    def cursor(self) -> Cursor:  # type: ignore[override]  # the driver's own can be awaited as well; nobody does
        return Cursor(self)


class Cursor:
    """Of aiosqlite's cursor what SQLAlchemy uses, where rows are fetched as soon as a statement has run."""

    arraysize = 1

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._rows: list[Any] = []
        self.description: Any = None
        self.rowcount = -1
        self.lastrowid: int | None = None

    async def __aenter__(self) -> Cursor:
        return self

    async def execute(self, statement: str, parameters: Sequence[Any] = ()) -> None:
        await self._in_thread(sqlite3.Cursor.execute, statement, parameters)

    async def executemany(self, statement: str, parameters: Sequence[Sequence[Any]]) -> None:
        await self._in_thread(sqlite3.Cursor.executemany, statement, parameters)

    async def fetchall(self) -> list[Any]:
        return self._rows

    async def close(self) -> None:
        self._rows = []

    async def _in_thread(self, how: Callable[..., Any], statement: str, parameters: Sequence[Any]) -> None:
        await self._connection._execute(self._run, how, statement, parameters)  # type: ignore[no-untyped-call]

    def _run(self, how: Callable[..., Any], statement: str, parameters: Sequence[Any]) -> None:
        """In the connection's thread."""
        cursor = self._connection._conn.cursor()
        try:
            how(cursor, statement, parameters)
            self.description = cursor.description
            self._rows = cursor.fetchall() if cursor.description else []
            self.rowcount, self.lastrowid = cursor.rowcount, cursor.lastrowid
        finally:
            cursor.close()
