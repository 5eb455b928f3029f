"""A job's summary, again whenever it changes."""

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
"""A job of which nothing is heard grows older all the same."""
PAUSE_SECONDS = 0.25
"""Shortest time from tick to tick; changes in between are one."""


async def _told(job: str, db: Db, now: float) -> str:
    return to_json(await summaries.job_summary(db, job, now=now)).decode()


router = APIRouter(prefix="/jobs/{job}", tags=["jobs"])


async def _known(job: str, db: Db, clock: Clock) -> str:
    # Before the stream begins, so that an unknown job is a 404 and not a stream that breaks off.
    await summaries.job_summary(db, job, now=clock())
    return job


@router.get(
    "/stream",
    response_class=EventSourceResponse,
    dependencies=[StreamPlace],
    responses={429: {"description": "As many streams are open for you as may be"}},
)
async def stream(
    job: Annotated[str, Depends(_known)], db: Db, changes: Changes, clock: Clock, shared: SharedAnswers
) -> AsyncIterator[ServerSentEvent]:
    """Server-sent events named `tick`, each with the job's summary as JSON; they end when the job is deleted."""
    with suppress(UnknownJob), changes.subscribe(job) as subscription:
        while not changes.closed:
            told = await shared.answer(job, "tick", lambda: _told(job, db, clock()))
            yield ServerSentEvent(raw_data=told, event="tick")
            await asyncio.sleep(PAUSE_SECONDS)
            await subscription.wait(TICK_SECONDS)
