"""Jobs: lists, summaries, timelines and analyses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial
from typing import Annotated

from fastapi import Depends, Query
from fastapi.sse import EventSourceResponse, ServerSentEvent
from starlette.requests import Request
from starlette.responses import Response

from holdfast.protocol.analyses import Goodput, JobPlan, RankTimes, Recovery
from holdfast.protocol.field_types import MAX_INTEGER, MAX_ITERATION
from holdfast.protocol.fleet import BulkChange, BulkResult, Fleet
from holdfast.protocol.jobs import (
    CheckpointInfo,
    Edit,
    ForkFamily,
    JobNumbers,
    JobStatus,
    JobSummary,
    NoticeInfo,
    NumberChanges,
)
from holdfast.protocol.timeline import ShortWindow, Timeline, Window
from holdfast_server.api.desired_state import MAX_EDIT_BYTES
from holdfast_server.api.endpoints import Router
from holdfast_server.api.responses import EncodedBody, Json, encoding_for, parse
from holdfast_server.control import bulk, control, deletion, plans
from holdfast_server.core.access import ADMINISTER, FOLLOW, LISTS, VIEW, password_is_old
from holdfast_server.core.encoding import to_json
from holdfast_server.core.errors import UnknownJob
from holdfast_server.http.auth_middleware import ask_for_password
from holdfast_server.http.dependencies import Asker, Body, Changes, Clock, Db, Now, SharedAnswers, StreamPlace, Who
from holdfast_server.queries import fleet, goodput, ranks, recovery, summaries, timeline
from holdfast_server.queries.job_view import find_job, view_job
from holdfast_server.queries.timeline_annotations import Axis
from holdfast_server.samples.limits import MACHINE_RANK

NOT_FOUND = "No such job"
MAX_BULK_BYTES = 2**20
TICK_SECONDS = 5.0
"""Longest time between ticks: the age of a silent job's last report changes too."""
PAUSE_SECONDS = 0.25
"""Shortest time between ticks."""

Limit = Annotated[int, Query(ge=1, le=500)]

router = Router("/api/v1/jobs", tag="jobs")


@router.endpoint("GET", "", access=LISTS, returns=Fleet, errors={422: "Invalid parameter"})
def jobs(
    db: Db,
    now: Now,
    asker: Asker,
    search: Annotated[str, Query(description="part of a job's name or host, case-insensitive")] = "",
    status: JobStatus | None = None,
    project: str | None = None,
    owner: Annotated[str | None, Query(description="who launched the newest attempt")] = None,
    label: Annotated[
        list[str] | None, Query(description="labels that all match: `name`, or `name: value`")
    ] = None,
    archived: Annotated[bool, Query(description="list the archived jobs instead of the others")] = False,
    sort: Annotated[
        fleet.FleetSort, Query(description="`living`: running jobs by name, then the others")
    ] = "heard",
    reverse: Annotated[bool, Query(description="reverse the order; not for `living`")] = False,
    page: Annotated[int, Query(ge=1, le=MAX_INTEGER)] = 1,
    size: Annotated[int, Query(ge=1, le=fleet.MOST_ROWS, description="jobs per page")] = fleet.PAGE_ROWS,
) -> Response:
    """List one page of the jobs that match, with their number by status."""
    question = fleet.FleetQuery(
        search=search,
        status=status,
        project=project,
        owner=owner,
        labels=tuple(label or ()),
        archived=archived,
        order=sort,
        reverse=reverse,
        page=page,
        size=size,
        visible_projects=asker.visible_projects,
    )
    with db.read() as session:
        return Json(fleet.fleet(session, question, now=now))


@router.endpoint(
    "POST",
    "/changes",
    access=LISTS,  # the route checks each job
    body=BulkChange,
    returns=BulkResult,
    errors={422: "Invalid budget, or not 1 to 2,000 jobs"},
    max_body_bytes=MAX_BULK_BYTES,
)
def change(request: Request, body: Body, db: Db, now: Now, asker: Asker) -> Response:
    """Change several jobs at once, by name or by a filter; each is changed or refused independently."""
    asked = parse(body, BulkChange)
    if asked.action in bulk.FAR_REACHING and password_is_old(asker, now=now):
        return ask_for_password(request)
    return Json(bulk.change(db, asked, asker=asker, now=now))


@router.endpoint("GET", "/{job}", access=VIEW, returns=JobSummary, errors={404: NOT_FOUND})
def summary(job: str, db: Db, now: Now) -> Response:
    """Return a job: status, position, settings, measured cost and unsaved work."""
    with view_job(db, job, now=now) as view:
        return Json(summaries.job_summary(view))


@router.endpoint(
    "DELETE",
    "/{job}",
    access=ADMINISTER,
    status=204,
    errors={404: NOT_FOUND, 409: "It is running, or has reported in the meantime"},
)
def delete(job: str, db: Db, now: Now, who: Who) -> Response:
    """Delete a job with all its data on the server. Its store and its audit log entries remain."""
    deletion.delete_job(db, job, who=who, now=now)
    return Response(status_code=204)


@router.endpoint(
    "PATCH",
    "/{job}/numbers",
    access=ADMINISTER,
    body=NumberChanges,
    returns=JobNumbers,
    errors={404: NOT_FOUND, 422: "Invalid number"},
    max_body_bytes=MAX_EDIT_BYTES,
)
def numbers(job: str, body: Body, db: Db, now: Now, who: Who) -> Response:
    """Correct the largest attempt and lineage numbers of a job after a report with wrong numbers."""
    changes = parse(body, NumberChanges)
    return Json(control.set_numbers(db, job, changes, who=who, now=now))


@router.endpoint("GET", "/{job}/timeline", access=VIEW, returns=Timeline, errors={404: NOT_FOUND})
async def job_timeline(
    job: str,
    request: Request,
    db: Db,
    clock: Clock,
    shared: SharedAnswers,
    first: Annotated[float | None, Query(alias="from", ge=0, le=MAX_ITERATION)] = None,
    last: Annotated[float | None, Query(alias="to", ge=0, le=MAX_ITERATION)] = None,
    x: Annotated[
        Axis, Query(description="unit of `from` and `to`: iterations, or seconds since 1970")
    ] = "iteration",
    points: Annotated[int, Query(ge=2, le=timeline.MAX_POINTS)] = 1200,
    metric: Annotated[list[str] | None, Query(description="only these metrics; by default, all")] = None,
    marks: Annotated[
        int, Query(ge=10, le=timeline.MAX_MARKS, description="limit of annotations of each kind")
    ] = 500,
    checkpoints: Annotated[
        int | None,
        Query(ge=10, le=timeline.MAX_CHECKPOINTS, description="limit of checkpoints; by default, `marks`"),
    ] = None,
    digits: Annotated[
        int | None,
        Query(
            ge=2,
            le=17,
            description="significant digits of series, lineages, checkpoints, stalls, attempts and decisions, "
            "whose times then are in milliseconds; by default, all",
        ),
    ] = None,
    machine: Annotated[
        int | None, Query(ge=0, lt=MACHINE_RANK, description="rank whose machine is included; by default, none")
    ] = None,
) -> Response:
    """Return metrics and annotations of a range, in at most `points` buckets per lineage."""
    names = None if metric is None else tuple(metric)
    asked = timeline.TimelineQuery(
        start=first,
        end=last,
        axis=x,
        points=points,
        metrics=names,
        marks=marks,
        checkpoints=checkpoints,
        digits=digits,
        machine_rank=machine,
    )
    encoding = encoding_for(request.headers.get("Accept-Encoding", ""))

    def read() -> EncodedBody:
        return EncodedBody.of(timeline.timeline(db, job, asked, now=clock()), encoding)

    answer = await shared.answer(job, (asked, encoding), partial(db.ask, "answers", read))
    return answer.response()


@router.endpoint(
    "GET", "/{job}/goodput", access=VIEW, returns=Goodput, errors={404: NOT_FOUND, 422: "Invalid window"}
)
def job_goodput(job: str, db: Db, now: Now, window: Window = "24h") -> Response:
    """Break down the time of a window: productive, waiting, lost, restoring, starting, down, unexplained."""
    return Json(goodput.goodput(db, job, window, now=now))


@router.endpoint("GET", "/{job}/forks", access=VIEW, returns=ForkFamily, errors={404: NOT_FOUND})
def job_forks(job: str, db: Db, now: Now, asker: Asker) -> Response:
    """Return the job that it was forked from and its own forks, if you may see them."""
    with view_job(db, job, now=now) as view:
        return Json(summaries.family(view, visible=asker.visible_projects))


@router.endpoint(
    "GET", "/{job}/ranks", access=VIEW, returns=RankTimes, errors={404: NOT_FOUND, 422: "Invalid window"}
)
def job_ranks(job: str, db: Db, now: Now, window: ShortWindow = "1h") -> Response:
    """Compare the ranks, and name those that the others wait for."""
    return Json(ranks.rank_times(db, job, window, now=now))


@router.endpoint("GET", "/{job}/recovery", access=VIEW, returns=Recovery, errors={404: NOT_FOUND})
def job_recovery(job: str, db: Db, now: Now) -> Response:
    """Return where the job would resume from if it ended now: the newest snapshot or checkpoint in each place."""
    with view_job(db, job, now=now) as view:
        return Json(recovery.recovery(view))


@router.endpoint(
    "GET", "/{job}/plan", access=VIEW, returns=JobPlan, errors={404: NOT_FOUND, 422: "Invalid parameter"}
)
def plan(
    job: str,
    db: Db,
    now: Now,
    budget: Annotated[str | None, Query(description="0.035 or 3.5%")] = None,
    every: Annotated[str | None, Query(description="an interval to evaluate, as in 500 or 10min")] = None,
    write_budget: Annotated[str | None, Query(description="write budget: 2TB/day")] = None,
    max_unsaved_work: Annotated[str | None, Query(description="maximum unsaved work: 10min")] = None,
    mtbf: Annotated[str | None, Query(description="time between failures of the whole job: 3h")] = None,
    ranks: Annotated[str | None, Query(description="number of GPUs")] = None,
    restart: Annotated[str | None, Query(description="time from a failure until training resumes: 3min")] = None,
) -> Response:
    """Evaluate checkpoint intervals by goodput. Parameters that are not given have their current value."""
    asked = plans.what_if(
        budget=budget, write_budget=write_budget, max_unsaved_work=max_unsaved_work, every=every, mtbf=mtbf,
        ranks=ranks, restart=restart,
    )  # fmt: skip
    with view_job(db, job, now=now) as view:
        return Json(plans.plan_job(view, asked))


@router.endpoint(
    "GET",
    "/{job}/checkpoints",
    access=VIEW,
    returns=dict[str, list[CheckpointInfo]],
    errors={404: NOT_FOUND, 422: "Invalid `before`"},
)
def restore_points(job: str, db: Db, now: Now, limit: Limit = 50, before: str | None = None) -> Response:
    """List checkpoints in every state, newest first; `before` is the last id of the previous page."""
    with view_job(db, job, now=now) as view:
        return Json({"checkpoints": timeline.restore_points(view, limit=limit, before=before)})


@router.endpoint("GET", "/{job}/edits", access=VIEW, returns=dict[str, list[Edit]], errors={404: NOT_FOUND})
def edits(job: str, db: Db, now: Now, limit: Limit = 20) -> Response:
    """List the versions of the desired state, newest first."""
    with view_job(db, job, now=now) as view:
        return Json({"edits": timeline.edits(view, limit=limit)})


@router.endpoint(
    "GET", "/{job}/notices", access=VIEW, returns=dict[str, list[NoticeInfo]], errors={404: NOT_FOUND}
)
def notices(job: str, db: Db, now: Now, limit: Limit = 20) -> Response:
    """List the notices of the agent and the server, newest first."""
    with view_job(db, job, now=now) as view:
        return Json({"notices": timeline.notices(view, limit=limit)})


async def _known(job: str, db: Db) -> str:
    # Before the stream begins: an unknown job is answered with 404 instead of a stream that ends.
    def find() -> None:
        with db.read() as session:
            find_job(session, job)

    await db.ask("answers", find)
    return job


@router.endpoint(
    "GET",
    "/{job}/stream",
    access=FOLLOW,
    errors={429: "You have reached the limit of open streams"},
    response_class=EventSourceResponse,
    dependencies=[StreamPlace],
)
async def stream(
    job: Annotated[str, Depends(_known)], db: Db, changes: Changes, clock: Clock, shared: SharedAnswers
) -> AsyncIterator[ServerSentEvent]:
    """Stream server-sent events named `tick`, each with the job's summary as JSON, until the job is deleted."""

    def read() -> str:
        with view_job(db, job, now=clock()) as view:
            summary = summaries.job_summary(view)
        return to_json(summary).decode()

    with suppress(UnknownJob), changes.subscribe(job) as subscription:
        while not changes.closed:
            tick = await shared.answer(job, "tick", partial(db.ask, "answers", read))
            yield ServerSentEvent(raw_data=tick, event="tick")
            await asyncio.sleep(PAUSE_SECONDS)
            await subscription.wait(TICK_SECONDS)
