"""Dependencies of routes, as aliases: `def page(db: Db, now: Now)`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any, cast

from fastapi import Depends
from starlette.requests import HTTPConnection, Request

from holdfast_server.accounts.job_projects import JobProjects
from holdfast_server.core.bus import ChangeBus
from holdfast_server.core.errors import TooManyStreams
from holdfast_server.core.principal import OPERATOR, Principal
from holdfast_server.core.request_coalescing import RequestCoalescer
from holdfast_server.core.settings import ServerSettings
from holdfast_server.db import Database
from holdfast_server.http.metrics import ServerMetrics
from holdfast_server.http.services import Services, services_of


async def _services(connection: HTTPConnection) -> Services:
    return services_of(connection.app)


def _service(choose: Callable[[Services], Any]) -> Any:
    async def read(connection: HTTPConnection) -> Any:  # FastAPI would run a plain function in a thread
        return choose(services_of(connection.app))

    return Depends(read)


async def _principal(connection: HTTPConnection) -> Principal:
    return cast("Principal", connection.state.principal)


async def _who(connection: HTTPConnection) -> str:
    return (await _principal(connection)).name


async def _body(request: Request) -> bytes:
    return await request.body()


MAX_STREAMS = 20
"""Open streams per person and instance, including those of the person's keys."""


async def _stream_place(connection: HTTPConnection) -> AsyncIterator[None]:
    """Count an open stream for as long as the answer lasts. Raises TooManyStreams."""
    asker = await _principal(connection)
    if asker is OPERATOR:  # without accounts, all clients are this one
        yield
        return
    streams = services_of(connection.app).streams
    if streams[asker.owner] >= MAX_STREAMS:
        raise TooManyStreams(MAX_STREAMS)
    streams[asker.owner] += 1
    try:
        yield
    finally:
        streams[asker.owner] -= 1
        if not streams[asker.owner]:
            del streams[asker.owner]


ServicesOf = Annotated[Services, Depends(_services)]
Db = Annotated[Database, _service(lambda services: services.database)]
Changes = Annotated[ChangeBus, _service(lambda services: services.changes)]
SharedAnswers = Annotated[RequestCoalescer, _service(lambda services: services.coalescer)]
Clock = Annotated[Callable[[], float], _service(lambda services: services.clock)]
"""For an answer that takes long: a stream calls it once per tick. Other routes depend on `Now`."""
Now = Annotated[float, _service(lambda services: services.clock())]
"""Time of the request in seconds since the epoch."""
Body = Annotated[bytes, Depends(_body)]
"""The body of the request, as it was sent."""
Config = Annotated[ServerSettings, _service(lambda services: services.settings)]
Jobs = Annotated[JobProjects, _service(lambda services: services.job_projects)]
Metrics = Annotated[ServerMetrics, _service(lambda services: services.metrics)]
Asker = Annotated[Principal, Depends(_principal)]
"""The client. The access policy has already allowed its request."""
Who = Annotated[str, Depends(_who)]
"""The client's name, for the audit log and the list of edits."""
StreamPlace = Depends(_stream_place)
"""For `dependencies=` of a route whose answer is a stream."""
