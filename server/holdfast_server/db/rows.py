"""Statements for what is stored thousands of times a second: compiled once, and run by the driver's own cursor.

SQLAlchemy writes them, in either dialect. Its way from there to the driver takes some thirty times as long as
SQLite does, and a batch of samples needs a dozen of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sqlalchemy import ClauseElement, Connection
from sqlalchemy.exc import DBAPIError

Parameters = Mapping[str, Any]


class Statement:
    """Bound parameters are given by name; what it selects or returns comes as tuples.

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
        """Once for each set of parameters."""
        text, order, constants = self._for(connection)
        whole = [{**constants, **each} for each in parameters] if constants else parameters
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


def _as_ours(connection: Connection, text: str, error: Exception) -> BaseException:
    """As SQLAlchemy would raise it, so that whoever handles errors of the database need not tell them apart."""
    base = connection.dialect.loaded_dbapi.Error
    return DBAPIError.instance(text, None, error, base, dialect=connection.dialect)
