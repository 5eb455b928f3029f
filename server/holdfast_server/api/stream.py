"""A job's summary as a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Annotated

from fastapi import APIRouter, Depends
from fastapi.sse import EventSourceResponse, ServerSentEvent

from holdfast_server.core.encoding import to_json
from holdfast_server.core.errors import UnknownJob
from holdfast_server.http.dependencies import Changes, Clock, Db, SharedAnswers, StreamPlace
from holdfast_server.queries import summaries

TICK_SECONDS = 5.0
"""Longest time between ticks: the age of a silent job's last report changes too."""
PAUSE_SECONDS = 0.25
"""Shortest time between ticks."""


async def _tick(job: str, db: Db, now: float) -> str:
    return to_json(await summaries.job_summary(db, job, now=now)).decode()


router = APIRouter(prefix="/jobs/{job}", tags=["jobs"])


async def _known(job: str, db: Db, clock: Clock) -> str:
    # Before the stream begins: an unknown job is answered with 404 instead of a stream that ends.
    await summaries.job_summary(db, job, now=clock())
    return job


@router.get(
    "/stream",
    response_class=EventSourceResponse,
    dependencies=[StreamPlace],
    responses={429: {"description": "You have reached the limit of open streams"}},
)
async def stream(
    job: Annotated[str, Depends(_known)], db: Db, changes: Changes, clock: Clock, shared: SharedAnswers
) -> AsyncIterator[ServerSentEvent]:
    """Stream server-sent events named `tick`, each with the job's summary as JSON, until the job is deleted."""
    with suppress(UnknownJob), changes.subscribe(job) as subscription:
        while not changes.closed:
            tick = await shared.answer(job, "tick", lambda: _tick(job, db, clock()))
            yield ServerSentEvent(raw_data=tick, event="tick")
            await asyncio.sleep(PAUSE_SECONDS)
            await subscription.wait(TICK_SECONDS)
