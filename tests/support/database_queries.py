"""Recording of the SQL statements that a query executes, and their query plans."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import event
from sqlalchemy.engine import Engine
from sqlalchemy.orm import Session
from starlette.testclient import TestClient

from holdfast_server.db import Database

Statement = tuple[str, Any]


@contextmanager
def statements() -> Iterator[list[Statement]]:
    """Those that any engine executes meanwhile, with their values.

    The notifications of PostgreSQL are left out: a thread sends those of earlier changes when it gets to it.
    """
    noted: list[Statement] = []

    def note(*arguments: Any) -> None:
        if "pg_notify" not in arguments[2]:
            noted.append((arguments[2], arguments[3]))

    event.listen(Engine, "before_cursor_execute", note)
    try:
        yield noted
    finally:
        event.remove(Engine, "before_cursor_execute", note)


def plan(database: Database, statement: Statement) -> str:
    """SQLite's, in words."""
    sql, values = statement
    with database.read() as session:
        connection = session.connection()
        rows = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {sql}", values)
        return "; ".join(row[3] for row in rows)


def fill(database: Database, rows: dict[Any, list[dict[str, Any]]]) -> None:
    """Insert rows by table, in their order."""

    def work(session: Session) -> None:
        for table, values in rows.items():
            session.execute(table.__table__.insert(), values)

    database.write(work)


def of(client: TestClient) -> Database:
    database: Database = client.app.state.services.database  # type: ignore[attr-defined]
    return database


def alone(path: str, function: Callable[[Database], Any]) -> None:
    """With a database and no server around it, whose chores would ask questions of their own."""
    database = Database(path)
    database.prepare()
    database.open()
    try:
        function(database)
    finally:
        database.close()
