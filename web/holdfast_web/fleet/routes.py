"""The fleet page, its live fragment, and changes of several jobs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Annotated, cast, get_args
from urllib.parse import parse_qs, urlencode, urlsplit

from fastapi import Depends, Form, Query, Request
from fastapi.responses import RedirectResponse, Response
from fastapi.sse import EventSourceResponse, ServerSentEvent
from msgspec import UNSET

from holdfast.protocol.fleet import BulkAction, BulkChange, JobFilter
from holdfast.protocol.jobs import JobStatus
from holdfast.protocol.wire import DEFAULT_PORT
from holdfast_server.api.endpoints import Router
from holdfast_server.control import bulk, saved_views
from holdfast_server.core.access import LISTS, AccessRule, password_is_old
from holdfast_server.core.errors import InvalidSetting
from holdfast_server.core.principal import Principal
from holdfast_server.http.auth_middleware import ask_for_password
from holdfast_server.http.dependencies import Asker, Changes, Clock, Config, Db, Now, StreamPlace
from holdfast_server.queries.fleet import MOST_ROWS, PAGE_ROWS, FleetQuery, FleetSort
from holdfast_server.records.job_status import STATUSES
from holdfast_web.fleet import views
from holdfast_web.shared import forms
from holdfast_web.shared.routing import Text, local_path

TICK_SECONDS = 5.0
MIN_TICK_SECONDS = 0.5
"""Minimum time between ticks."""

router = Router()


async def _question(
    asker: Asker,
    search: str = "",
    status: str = "",
    project: str = "",
    owner: str = "",
    label: str = "",
    archived: str = "",
    group: str = "",
    sort: str = "",
    page: str = "",
    size: str = "",
) -> FleetQuery:
    return _parse(asker, search, status, project, owner, label, archived, group, sort, size, page)


def _parse(
    asker: Principal, search: str, status: str, project: str, owner: str, label: str, archived: str, group: str,
    sort: str, size: str, page: str = "",
) -> FleetQuery:  # fmt: skip
    """Parse the query of an address, where an empty field is unset; raise InvalidSetting."""
    if status and status not in STATUSES:
        raise InvalidSetting("status", f"unknown status {status!r}; use one of {', '.join(STATUSES)}")
    order = sort.removeprefix("-") or views.DEFAULT_ORDER
    if order not in get_args(FleetSort):
        raise InvalidSetting("sort", f"unknown sort key {sort!r}; use one of {', '.join(get_args(FleetSort))}")
    if group not in ("", "project"):
        raise InvalidSetting("group", f"unknown group {group!r}; use project")
    return FleetQuery(
        search=search,
        status=cast("JobStatus", status) or None,
        project=project or None,
        owner=owner.strip() or None,
        labels=forms.labels(label),
        archived=bool(archived),
        grouped=bool(group),
        order=cast("FleetSort", order),
        reverse=sort.startswith("-") and order != "living",
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


async def _hidden(hide: Annotated[list[str] | None, Query()] = None) -> frozenset[str]:
    return _columns(hide)


def _columns(hide: list[str] | None) -> frozenset[str]:
    for column in hide or ():
        if column not in views.COLUMNS:
            raise InvalidSetting("hide", f"unknown column {column!r}; use some of {', '.join(views.COLUMNS)}")
    return frozenset(hide or ())


Asked = Annotated[FleetQuery, Depends(_question)]
Hidden = Annotated[frozenset[str], Depends(_hidden)]


async def _rows(
    db: Db, now: Now, asker: Asker, request: Request, question: Asked, hidden: Hidden
) -> Callable[[], views.FleetRows]:
    """Return a function that reads the rows, for the thread of the route."""
    server = f"{request.url.scheme}://{request.url.netloc or f'127.0.0.1:{DEFAULT_PORT}'}"
    return partial(views.fleet_rows, db, question, hidden=hidden, asker=asker, server=server, now=now)


Rows = Annotated[Callable[[], views.FleetRows], Depends(_rows)]


@router.endpoint("GET", "/", access=LISTS)
def fleet_page(rows: Rows) -> Response:
    return rows().page()


@router.endpoint("GET", "/fleet/live", access=LISTS)
def fleet_live(rows: Rows) -> Response:
    return rows().response()


@router.endpoint("GET", "/fleet/account", access=LISTS)
def fleet_account(db: Db, now: Now, asker: Asker, config: Config, question: Asked) -> Response:
    """Return the account of the listed jobs, which the page loads once it is there."""
    return views.fleet_account(db, question, config.prices, asker=asker, now=now).response()


@router.endpoint(
    "POST",
    "/fleet/confirm",
    access=LISTS,  # the route checks each job
)
def confirm(
    request: Request, db: Db, now: Now, asker: Asker, action: Text,
    job: Annotated[list[str] | None, Form()] = None,
    all_matching: Text = "", budget: Text = "", write_budget: Text = "", on_trouble: Text = "",
    back: Text = "/",
) -> Response:  # fmt: skip
    """Ask before one change of the selected jobs, or of all jobs that match the filter of `back`."""
    if action == "compare":
        return RedirectResponse(f"/compare?{urlencode({'job': job or []}, doseq=True)}", 303)
    if action == "budget" and not budget.strip() and write_budget.strip():
        action = "write_budget"  # Enter in the field of the write budget presses the first button of the form
    if action in bulk.FAR_REACHING and password_is_old(asker, now=now):
        return ask_for_password(request)
    back = local_path(back)
    selected = BulkChange(
        action=_action(action),
        jobs=UNSET if all_matching else job or [],
        filter=_filter(back) if all_matching else UNSET,
        budget=forms.budget_from_percent(budget) if action == "budget" else None,
        write_budget=forms.write_budget(write_budget) if action == "write_budget" else None,
        on_trouble=on_trouble or None,
        preview=True,
    )
    preview = bulk.change(db, selected, asker=asker, now=now)
    ended = bulk.not_running(db, [one.job for one in preview.outcomes if not one.refusal], now=now)
    value = {"write_budget": write_budget, "on_trouble": on_trouble}.get(action, budget).strip()
    shown = views.bulk_confirmation(selected.action, preview, ended, value=value, back=back)
    return shown.response()


@router.endpoint(
    "POST",
    "/fleet/change",
    access=LISTS,  # the route checks each job
)
def change(
    request: Request,
    db: Db,
    now: Now,
    asker: Asker,
    action: Text,
    jobs: Text,
    budget: Text = "",
    write_budget: Text = "",
    on_trouble: Text = "",
    back: Text = "/",
) -> Response:
    """Change the confirmed jobs; answer with the result for each."""
    if action in bulk.FAR_REACHING and password_is_old(asker, now=now):
        return ask_for_password(request)
    wanted = BulkChange(
        action=_action(action),
        jobs=jobs.split(),
        budget=forms.budget_from_percent(budget) if action == "budget" else None,
        write_budget=forms.write_budget(write_budget) if action == "write_budget" else None,
        on_trouble=on_trouble or None,
    )
    result = bulk.change(db, wanted, asker=asker, now=now)
    words = views.ACTIONS[wanted.action][1]
    back = local_path(back)
    return views.BulkPage(action=wanted.action, outcomes=result.outcomes, words=words, back=back).response()


def _action(typed: str) -> BulkAction:
    if typed not in get_args(BulkAction):
        raise InvalidSetting("action", f"unknown action {typed!r}; use one of {', '.join(get_args(BulkAction))}")
    return cast("BulkAction", typed)


def _filter(address: str) -> JobFilter:
    """Return the filter of an address of the fleet page."""
    query = {name: values[-1] for name, values in parse_qs(urlsplit(address).query).items()}
    return JobFilter(
        search=query.get("search", ""),
        status=cast("JobStatus | None", query.get("status")),
        project=query.get("project"),
        owner=query.get("owner"),
        labels=list(forms.labels(query.get("label", ""))),
        archived=bool(query.get("archived")),
    )


@router.endpoint("POST", "/fleet/views", access=LISTS)
def save_view(
    db: Db, asker: Asker, view: Text = "", search: Text = "", status: Text = "", project: Text = "",
    owner: Text = "", label: Text = "", archived: Text = "", group: Text = "", sort: Text = "", size: Text = "",
    hide: Annotated[list[str] | None, Form()] = None,
) -> Response:  # fmt: skip
    """Save the filter, order and columns of the page's form under a name, for this user."""
    question = _parse(asker, search, status, project, owner, label, archived, group, sort, size)
    query = views.FleetLinks(question, _columns(hide)).query
    saved_views.save(db, asker.name, view, query)
    return RedirectResponse(f"/?{query}", 303)


@router.endpoint("POST", "/fleet/views/delete", access=LISTS)
def forget_view(db: Db, asker: Asker, name: Text = "") -> Response:
    saved_views.forget(db, asker.name, name)
    return RedirectResponse("/", 303)


@router.endpoint(
    "GET",
    "/fleet/stream",
    access=AccessRule(audience="lists", long_lived=True),
    response_class=EventSourceResponse,
    dependencies=[StreamPlace],
)
async def fleet_stream(changes: Changes, clock: Clock) -> AsyncIterator[ServerSentEvent]:
    with changes.subscribe(None) as subscription:
        while not changes.closed:
            yield ServerSentEvent(data={"at": clock()}, event="tick")
            await asyncio.sleep(MIN_TICK_SECONDS)
            await subscription.wait(TICK_SECONDS)
