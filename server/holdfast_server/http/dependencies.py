"""What routes ask for, as aliases: `async def page(db: Db, clock: Clock)`.

They are coroutines because FastAPI runs any other function in a thread, which takes longer than all that they do.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Annotated, cast

from fastapi import Depends
from starlette.requests import HTTPConnection

from holdfast_server.accounts.job_projects import Belonging
from holdfast_server.core.bus import LocalBus
from holdfast_server.core.errors import TooManyStreams
from holdfast_server.core.principal import OPERATOR, Principal
from holdfast_server.core.request_coalescing import Shared
from holdfast_server.core.settings import ServerSettings
from holdfast_server.db import Database
from holdfast_server.http.metrics import ServerMeasures


async def _database(connection: HTTPConnection) -> Database:
    return cast("Database", connection.app.state.database)


async def _changes(connection: HTTPConnection) -> LocalBus:
    return cast("LocalBus", connection.app.state.changes)


async def _shared(connection: HTTPConnection) -> Shared:
    return cast("Shared", connection.app.state.shared)


async def _clock(connection: HTTPConnection) -> Callable[[], float]:
    return cast("Callable[[], float]", connection.app.state.clock)


async def _config(connection: HTTPConnection) -> ServerSettings:
    return cast("ServerSettings", connection.app.state.settings)


async def _measures(connection: HTTPConnection) -> ServerMeasures:
    return cast("ServerMeasures", connection.app.state.measures)


async def _exporting(connection: HTTPConnection) -> asyncio.Semaphore:
    return cast("asyncio.Semaphore", connection.app.state.exporting)


async def _jobs(connection: HTTPConnection) -> Belonging:
    return cast("Belonging", connection.app.state.belonging)


async def _asker(connection: HTTPConnection) -> Principal:
    return cast("Principal", connection.state.principal)


async def _who(connection: HTTPConnection) -> str:
    return (await _asker(connection)).name


MAX_STREAMS = 20
"""Streams that one person, with all keys of theirs, may have open at an instance."""


async def _stream_place(connection: HTTPConnection) -> AsyncIterator[None]:
    """Take one of the places for as long as the answer lasts. Raises TooManyStreams."""
    asker = await _asker(connection)
    if asker is OPERATOR:  # without accounts it is everybody
        yield
        return
    streams = cast("Counter[str]", connection.app.state.streams)
    if streams[asker.owner] >= MAX_STREAMS:
        raise TooManyStreams(MAX_STREAMS)
    streams[asker.owner] += 1
    try:
        yield
    finally:
        streams[asker.owner] -= 1
        if not streams[asker.owner]:
            del streams[asker.owner]


Exporting = Annotated[asyncio.Semaphore, Depends(_exporting)]
"""Room for what makes files of what is stored."""
Db = Annotated[Database, Depends(_database)]
Changes = Annotated[LocalBus, Depends(_changes)]
SharedAnswers = Annotated[Shared, Depends(_shared)]
Clock = Annotated[Callable[[], float], Depends(_clock)]
"""Call it once per operation and pass the time on; a stream calls it once a tick."""
Config = Annotated[ServerSettings, Depends(_config)]
Jobs = Annotated[Belonging, Depends(_jobs)]
"""Which project each belongs to."""
Measures = Annotated[ServerMeasures, Depends(_measures)]
Who = Annotated[str, Depends(_who)]
"""The name of whoever asks, for the audit log and beside edits."""
StreamPlace = Depends(_stream_place)
"""In `dependencies=` of a route whose answer is a stream."""
Asker = Annotated[Principal, Depends(_asker)]
"""Whoever asks; that they may is decided before the route is reached."""
