"""What routes ask for, as aliases: `async def page(db: Db, clock: Clock)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, cast

from fastapi import Depends
from starlette.requests import HTTPConnection

from holdfast_server.bus import LocalBus
from holdfast_server.db import Database
from holdfast_server.measures import ServerMeasures
from holdfast_server.settings import ServerSettings


def _database(connection: HTTPConnection) -> Database:
    return cast("Database", connection.app.state.database)


def _changes(connection: HTTPConnection) -> LocalBus:
    return cast("LocalBus", connection.app.state.changes)


def _clock(connection: HTTPConnection) -> Callable[[], float]:
    return cast("Callable[[], float]", connection.app.state.clock)


def _config(connection: HTTPConnection) -> ServerSettings:
    return cast("ServerSettings", connection.app.state.settings)


def _measures(connection: HTTPConnection) -> ServerMeasures:
    return cast("ServerMeasures", connection.app.state.measures)


def _who() -> str:
    # People get names with accounts; until then whoever holds the page, or the token, is the operator.
    return "operator"


Db = Annotated[Database, Depends(_database)]
Changes = Annotated[LocalBus, Depends(_changes)]
Clock = Annotated[Callable[[], float], Depends(_clock)]
"""Call it once per operation and pass the time on; a stream calls it once a tick."""
Config = Annotated[ServerSettings, Depends(_config)]
Measures = Annotated[ServerMeasures, Depends(_measures)]
Who = Annotated[str, Depends(_who)]
