"""What people want a job to be: read by its agent in a long poll, edited from the version one has seen."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Annotated

from fastapi import APIRouter, Header, Query
from starlette.requests import Request
from starlette.responses import Response

from holdfast.protocol.jobs import DesiredChanges
from holdfast.protocol.messages import Desired
from holdfast.protocol.questions import SettingsPreview
from holdfast_server.api.openapi import body, returns
from holdfast_server.api.responses import Json, parse, refusal
from holdfast_server.control import control, plans
from holdfast_server.core.bus import LocalBus
from holdfast_server.core.errors import InvalidSetting
from holdfast_server.db import Database, DatabaseBusy, DatabaseUnavailable
from holdfast_server.http.dependencies import Asker, Changes, Clock, Db, Jobs, Who

MAX_WAIT_SECONDS = 60.0
MAX_EDIT_BYTES = 2**16
NO_JOB = ""
"""Stands for a job that the asker must not learn of. No job has this name, so the answers are those for any job
that has not reported."""

router = APIRouter(prefix="/jobs/{job}", tags=["control"])


@router.get("/desired", responses=returns(Desired, _204="No version after `after` yet"))
async def read(
    job: str,
    db: Db,
    changes: Changes,
    asker: Asker,
    jobs: Jobs,
    clock: Clock,
    after: Annotated[int, Query(description="Answer once there is a later version than this one")] = -1,
    wait: Annotated[float, Query(ge=0, le=MAX_WAIT_SECONDS, description="For at most so many seconds")] = 0,
) -> Response:
    """The newest version; with `after` and `wait` a long poll. An unknown job is one that nobody has edited.

    An agent that waits for what comes after a version has that version: the pages then say that it was delivered.
    """
    if await jobs.hidden(asker, job):
        job = NO_JOB
    if wait and after > 0 and "report" in asker.scopes:
        # What is not noted now is with the agent's next question; its answer matters more.
        with suppress(DatabaseBusy, DatabaseUnavailable):
            await control.delivered(db, job, after)
    desired = await _later(db, changes, clock, job, after, wait)
    return Response(status_code=204) if desired is None else _tagged(desired)


async def _later(
    db: Database, changes: LocalBus, clock: Clock, job: str, after: int, wait_seconds: float
) -> Desired | None:
    deadline = asyncio.get_running_loop().time() + wait_seconds
    # Listening starts before the first look, so that no edit falls between the two.
    with changes.subscribe(job, samples=False) as subscription:
        while True:
            desired = await control.desired(db, job, now=clock())
            if desired.version > after:
                return desired
            remaining = deadline - asyncio.get_running_loop().time()
            if remaining <= 0 or not await subscription.wait(remaining):
                return None


@router.patch(
    "/desired",
    max_body_size=MAX_EDIT_BYTES,
    openapi_extra=body(DesiredChanges),
    responses=returns(
        Desired,
        _404="No such job",
        _409="Somebody changed a setting since that version; a restore that came or went does not count",
        _422="A value that cannot be a setting",
        _428="No If-Match",
    ),
)
async def edit(
    job: str,
    request: Request,
    db: Db,
    who: Who,
    clock: Clock,
    if_match: Annotated[str | None, Header(description='The version edited, as in "3"')] = None,
) -> Response:
    """Change what is desired, from the version that If-Match names. null: back to the script's own setting."""
    if if_match is None:
        message = 'say in If-Match which version you edit, as in If-Match: "3": GET shows it as its ETag'
        return refusal(428, "version_required", message)
    changes = parse(await request.body(), DesiredChanges)
    return _tagged(await control.edit(db, job, changes, version=_version(if_match), who=who, now=clock()))


@router.get("/preview", responses=returns(SettingsPreview, _404="No such job", _422="Not a setting"))
async def preview(
    job: str, db: Db, clock: Clock, budget: float | None = None, every: int | None = None
) -> Response:
    """The interval, overhead and exposure that these settings would lead to."""
    return Json(await plans.preview_settings(db, job, budget=budget, every=every, now=clock()))


def _version(if_match: str) -> int:
    digits = if_match.strip().removeprefix("W/").strip('"')
    if not (digits.isascii() and digits.isdigit() and len(digits) < 16):
        raise InvalidSetting("If-Match", f'If-Match {if_match!r} is not a version, as in "3"')
    return int(digits)


def _tagged(desired: Desired) -> Response:
    answer = Json(desired)
    answer.headers["ETag"] = f'"{desired.version}"'
    return answer
