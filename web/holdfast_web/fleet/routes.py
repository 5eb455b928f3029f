"""The fleet page, its live fragment, and a budget for several jobs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, cast, get_args

from fastapi import APIRouter, Depends, Form, Request
from fastapi.responses import Response
from fastapi.sse import EventSourceResponse, ServerSentEvent

from holdfast.protocol.messages import DEFAULT_PORT
from holdfast_server.control import control
from holdfast_server.core.errors import InvalidSetting
from holdfast_server.http.dependencies import Asker, Changes, Clock, Db, StreamPlace
from holdfast_server.queries.fleet import MOST_ROWS, PAGE_ROWS, FleetQuery, FleetSort
from holdfast_server.records.job_status import STATUSES
from holdfast_web.fleet import context
from holdfast_web.shared import forms
from holdfast_web.shared.routing import PageRoute, Text, local_path

TICK_SECONDS = 5.0
MIN_TICK_SECONDS = 0.5
"""Minimum time between ticks."""

router = APIRouter(route_class=PageRoute, include_in_schema=False)


def _question(
    asker: Asker,
    search: str = "",
    status: str = "",
    project: str = "",
    group: str = "",
    sort: str = "",
    page: str = "",
    size: str = "",
) -> FleetQuery:
    """Parse the query of an address, where an empty field is unset; raise InvalidSetting."""
    if status and status not in STATUSES:
        raise InvalidSetting("status", f"unknown status {status!r}; use one of {', '.join(STATUSES)}")
    if sort and sort not in get_args(FleetSort):
        raise InvalidSetting("sort", f"unknown sort key {sort!r}; use one of {', '.join(get_args(FleetSort))}")
    if group not in ("", "project"):
        raise InvalidSetting("group", f"unknown group {group!r}; use project")
    return FleetQuery(
        search=search,
        status=status or None,
        project=project or None,
        grouped=bool(group),
        order=cast("FleetSort", sort) if sort else "living",
        page=_number("page", page, 1, most=10**9),
        size=_number("size", size, PAGE_ROWS, most=MOST_ROWS),
        visible_projects=asker.visible_projects,
    )


def _number(name: str, typed: str, default: int, *, most: int) -> int:
    if not typed:
        return default
    if not (typed.isascii() and typed.isdigit() and len(typed) < 10 and 1 <= int(typed) <= most):
        raise InvalidSetting(name, f"{name} {typed!r} must be a number from 1 to {most}")
    return int(typed)


Asked = Annotated[FleetQuery, Depends(_question)]


def _server(request: Request) -> str:
    return f"{request.url.scheme}://{request.url.netloc or f'127.0.0.1:{DEFAULT_PORT}'}"


@router.get("/")
async def fleet_page(db: Db, clock: Clock, request: Request, question: Asked) -> Response:
    return (await context.fleet_rows(db, question, server=_server(request), now=clock())).page()


@router.get("/fleet/live")
async def fleet_live(db: Db, clock: Clock, request: Request, question: Asked) -> Response:
    return (await context.fleet_rows(db, question, server=_server(request), now=clock())).response()


@router.post("/fleet/budget")
async def set_budgets(
    db: Db, clock: Clock, asker: Asker, budget: Text, job: Annotated[list[str] | None, Form()] = None,
    back: Text = "/",
) -> Response:  # fmt: skip
    """Set one budget for the selected jobs; answer with the result for each."""
    wanted = forms.budget_from_percent(budget)
    outcomes = await control.set_budgets(db, job or [], wanted, asker=asker, now=clock())
    return context.BulkPage(outcomes=outcomes, typed=f"{wanted * 100:.6g}", back=local_path(back)).response()


@router.get("/fleet/stream", response_class=EventSourceResponse, dependencies=[StreamPlace])
async def fleet_stream(changes: Changes, clock: Clock) -> AsyncIterator[ServerSentEvent]:
    with changes.subscribe(None) as subscription:
        while not changes.closed:
            yield ServerSentEvent(data={"at": clock()}, event="tick")
            await asyncio.sleep(MIN_TICK_SECONDS)
            await subscription.wait(TICK_SECONDS)
