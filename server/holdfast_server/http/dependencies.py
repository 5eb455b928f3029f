"""Dependencies of routes, as aliases: `async def page(db: Db, clock: Clock)`."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any, cast

from fastapi import Depends
from starlette.requests import HTTPConnection

from holdfast_server.accounts.job_projects import JobProjects
from holdfast_server.core.bus import ChangeBus
from holdfast_server.core.errors import TooManyStreams
from holdfast_server.core.principal import OPERATOR, Principal
from holdfast_server.core.request_coalescing import RequestCoalescer
from holdfast_server.core.settings import ServerSettings
from holdfast_server.db import Database
from holdfast_server.http.metrics import ServerMetrics


def _from_state(name: str) -> Any:
    async def read(connection: HTTPConnection) -> Any:  # FastAPI would run a plain function in a thread
        return getattr(connection.app.state, name)

    return Depends(read)


async def _now(connection: HTTPConnection) -> float:
    return cast("float", connection.app.state.clock())


async def _principal(connection: HTTPConnection) -> Principal:
    return cast("Principal", connection.state.principal)


async def _who(connection: HTTPConnection) -> str:
    return (await _principal(connection)).name


MAX_STREAMS = 20
"""Open streams per person and instance, including those of the person's keys."""


async def _stream_place(connection: HTTPConnection) -> AsyncIterator[None]:
    """Count an open stream for as long as the answer lasts. Raises TooManyStreams."""
    asker = await _principal(connection)
    if asker is OPERATOR:  # without accounts, all clients are this one
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


Db = Annotated[Database, _from_state("database")]
Changes = Annotated[ChangeBus, _from_state("changes")]
SharedAnswers = Annotated[RequestCoalescer, _from_state("coalescer")]
Clock = Annotated[Callable[[], float], _from_state("clock")]
"""For an answer that takes long: a stream calls it once per tick. Other routes depend on `Now`."""
Now = Annotated[float, Depends(_now)]
"""Time of the request in seconds since the epoch."""
Config = Annotated[ServerSettings, _from_state("settings")]
Exporting = Annotated[asyncio.Semaphore, _from_state("exporting")]
"""Limits how many files are exported at once."""
Jobs = Annotated[JobProjects, _from_state("job_projects")]
Metrics = Annotated[ServerMetrics, _from_state("metrics")]
Asker = Annotated[Principal, Depends(_principal)]
"""The client. The access policy has already allowed its request."""
Who = Annotated[str, Depends(_who)]
"""The client's name, for the audit log and the list of edits."""
StreamPlace = Depends(_stream_place)
"""For `dependencies=` of a route whose answer is a stream."""
