"""The desired state of a job: agents read it by long polling, people edit it with If-Match."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from typing import Annotated

from fastapi import Header, Query
from starlette.responses import Response

from holdfast.protocol.analyses import SettingsPreview
from holdfast.protocol.field_types import MAX_INTEGER
from holdfast.protocol.jobs import DesiredChanges
from holdfast.protocol.wire import Desired
from holdfast_server.api.endpoints import Router
from holdfast_server.api.responses import Json, parse, refusal
from holdfast_server.control import control, plans
from holdfast_server.core.access import OPERATE, VIEW, AccessRule
from holdfast_server.core.bus import ChangeBus
from holdfast_server.core.errors import InvalidSetting
from holdfast_server.db import Database, DatabaseBusy, DatabaseUnavailable
from holdfast_server.http.dependencies import Asker, Body, Changes, Clock, Db, Jobs, Now, Who
from holdfast_server.queries.job_view import view_job

MAX_WAIT_SECONDS = 60.0
MAX_EDIT_BYTES = 2**16
NO_JOB = ""
"""Stands for a job that is hidden from the client. No job has this name, so the answers are those for an unknown
job."""

router = Router("/api/v1/jobs/{job}", tag="control")


@router.endpoint(
    "GET",
    "/desired",
    access=AccessRule(audience="job", agents=True, long_lived=True),
    returns=Desired,
    errors={204: "No version newer than `after` yet"},
)
async def read(
    job: str,
    db: Db,
    changes: Changes,
    asker: Asker,
    jobs: Jobs,
    clock: Clock,
    after: Annotated[int, Query(description="answer as soon as there is a newer version than this one")] = -1,
    alert_pins: Annotated[
        str | None,
        Query(description="or as soon as the checkpoints kept for alerts differ from these, separated by commas"),
    ] = None,
    share_number: Annotated[
        int | None, Query(ge=0, le=MAX_INTEGER, description="or as soon as the number of the store shares differs")
    ] = None,
    wait: Annotated[float, Query(ge=0, le=MAX_WAIT_SECONDS, description="wait at most this many seconds")] = 0,
) -> Response:
    """Return the newest version; with `after` and `wait`, use long polling. An unknown job has the default state.

    `after` confirms the delivery of that version, which the pages then show.
    """
    if await jobs.is_hidden(asker, job):
        job = NO_JOB
    if wait and after > 0 and "report" in asker.scopes:
        # The agent's next request confirms it again: answering matters more.
        with suppress(DatabaseBusy, DatabaseUnavailable):
            await control.delivered(db, job, after)
    desired = await _later(db, changes, clock, job, after, alert_pins, share_number, wait)
    return Response(status_code=204) if desired is None else tagged(desired)


async def _later(
    db: Database,
    changes: ChangeBus,
    clock: Clock,
    job: str,
    after: int,
    alert_pins: str | None,
    share_number: int | None,
    wait_seconds: float,
) -> Desired | None:
    deadline = asyncio.get_running_loop().time() + wait_seconds
    # Subscribe before the first read, so that no edit between the two is missed.
    with changes.subscribe(job, samples=False) as subscription:
        while True:
            read = partial(
                control.newer_desired, db, job, after=after, alert_pins=alert_pins, share_number=share_number,
                now=clock(),
            )  # fmt: skip
            desired = await db.ask("agents", read)
            if desired is not None:
                return desired
            remaining = deadline - asyncio.get_running_loop().time()
            if remaining <= 0 or not await subscription.wait(remaining):
                return None


@router.endpoint(
    "PATCH",
    "/desired",
    access=OPERATE,
    body=DesiredChanges,
    returns=Desired,
    errors={
        404: "No such job",
        409: "A setting that decides the same changed after that version",
        422: "Invalid setting",
        428: "No If-Match",
    },
    max_body_bytes=MAX_EDIT_BYTES,
)
def edit(
    job: str,
    body: Body,
    db: Db,
    who: Who,
    now: Now,
    if_match: Annotated[str | None, Header(description='the version that the edit is based on, as in "3"')] = None,
) -> Response:
    """Change the desired state, based on the version in If-Match. `null` resets a setting to that of the
    script."""
    if if_match is None:
        message = 'send the version that you edit, as in If-Match: "3": it is the ETag of GET'
        return refusal(428, "version_required", message)
    changes = parse(body, DesiredChanges)
    return tagged(control.edit(db, job, changes, version=_version(if_match), who=who, now=now))


@router.endpoint(
    "GET", "/preview", access=VIEW, returns=SettingsPreview, errors={404: "No such job", 422: "Invalid setting"}
)
def preview(job: str, db: Db, now: Now, budget: float | None = None, every: str | None = None) -> Response:
    """Predict the interval, overhead and unsaved work for these settings."""
    with view_job(db, job, now=now) as view:
        return Json(plans.preview_settings(view.job, budget=budget, every=every))


def _version(if_match: str) -> int:
    digits = if_match.strip().removeprefix("W/").strip('"')
    if not (digits.isascii() and digits.isdigit() and len(digits) < 16):
        raise InvalidSetting("If-Match", f'If-Match {if_match!r} is not a version, as in "3"')
    return int(digits)


def tagged(desired: Desired) -> Response:
    answer = Json(desired)
    answer.headers["ETag"] = f'"{desired.version}"'
    return answer
