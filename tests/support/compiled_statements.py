"""Compiled SQL statements that all servers of a test process share.

An engine compiles each statement once, and each server has its own engines: tests that start a server each would
spend a quarter of their time on it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from sqlalchemy import Connection, Engine, event
from sqlalchemy.engine.default import DefaultDialect

_compiled: dict[Any, Any] = {}


@cache
def share() -> None:
    """Let all engines of this process use each other's compiled statements."""

    @event.listens_for(Engine, "engine_connect")
    def use(connection: Connection) -> None:
        connection.execution_options(compiled_cache=_compiled)

    # The dialect is part of the key, and each engine has an instance, which compiles as any other of its class.
    DefaultDialect.__eq__ = lambda self, other: type(self) is type(other)  # type: ignore[method-assign]
    DefaultDialect.__hash__ = lambda self: hash(type(self))  # type: ignore[method-assign]
