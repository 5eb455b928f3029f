"""Recording of the SQL statements that a query executes, and their query plans."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import event
from sqlalchemy.engine import Engine
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.testclient import TestClient

from holdfast_server.db import Database

Statement = tuple[str, Any]


@contextmanager
def statements() -> Iterator[list[Statement]]:
    """Those that any engine executes meanwhile, with their values."""
    noted: list[Statement] = []

    def note(*arguments: Any) -> None:
        noted.append((arguments[2], arguments[3]))

    event.listen(Engine, "before_cursor_execute", note)
    try:
        yield noted
    finally:
        event.remove(Engine, "before_cursor_execute", note)


async def plan(database: Database, statement: Statement) -> str:
    """SQLite's, in words."""
    sql, values = statement
    async with database.read() as session:
        connection = await session.connection()
        rows = await connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {sql}", values)
        return "; ".join(row[3] for row in rows)


async def fill(database: Database, rows: dict[Any, list[dict[str, Any]]]) -> None:
    """Insert rows by table, in their order."""

    async def work(session: AsyncSession) -> None:
        for table, values in rows.items():
            await session.execute(table.__table__.insert(), values)

    await database.write(work)


def of(client: TestClient) -> Database:
    database: Database = client.app.state.services.database  # type: ignore[attr-defined]
    return database


def in_loop(client: TestClient, function: Callable[..., Any], *arguments: Any) -> Any:
    assert client.portal is not None
    return client.portal.call(function, *arguments)


def alone(path: str, function: Callable[[Database], Any]) -> None:
    """With a database and no server around it, whose chores would ask questions of their own."""

    async def run() -> None:
        database = Database(path)
        database.prepare()
        await database.open()
        try:
            await function(database)
        finally:
            await database.close()

    asyncio.run(run())
