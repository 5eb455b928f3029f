"""The list of stores, and the page of one with its limit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar
from urllib.parse import urlencode

from fastapi import Query
from fastapi.responses import RedirectResponse, Response

from holdfast.protocol.field_types import MAX_INTEGER
from holdfast.protocol.stores import MAX_WRITERS, NewStoreLimit, NewStoreWeight, StoreInfo, StoreList
from holdfast_server.api.endpoints import Router
from holdfast_server.control import stores as control
from holdfast_server.core.access import LISTS, SERVER_ADMIN
from holdfast_server.core.errors import InvalidSetting, RequestRefused
from holdfast_server.core.principal import Principal
from holdfast_server.db import Database
from holdfast_server.http.dependencies import Asker, Db, Now, Who
from holdfast_server.queries import stores
from holdfast_server.queries.stores import StoreQuery, StoreSort
from holdfast_web.shared.forms import seconds
from holdfast_web.shared.render import View
from holdfast_web.shared.routing import Text, headers_of

router = Router("/stores")


@dataclass(frozen=True, kw_only=True)
class StoresPage(View):
    template: ClassVar[str] = "stores/stores.html"
    found: StoreList
    asked: StoreQuery
    previous: str
    """Address of the page before; empty on the first one."""
    following: str
    """Address of the page after; empty on the last one."""
    now: float


@dataclass(frozen=True, kw_only=True)
class StorePage(View):
    template: ClassVar[str] = "stores/store.html"
    store: StoreInfo
    may_change: bool
    typed: dict[str, str]
    """Fields of the form of the limit."""
    refused: str = ""
    """Why a change was refused."""
    now: float


@router.endpoint("GET", "", access=LISTS)
def list_stores(
    db: Db,
    asker: Asker,
    now: Now,
    search: str = "",
    job: str = "",
    sort: StoreSort = "load",
    page: Annotated[int, Query(ge=1, le=MAX_INTEGER)] = 1,
) -> Response:
    asked = StoreQuery(
        search=search, job=job or None, order=sort, page=page, visible_projects=asker.visible_projects
    )
    with db.read() as session:
        found = stores.find(session, asked, now=now)
    if job and found.total == 1:
        return RedirectResponse(f"/stores/{found.stores[0].id}", 303)
    before = _address(asked, found.page - 1) if found.page > 1 else ""
    after = _address(asked, found.page + 1) if found.page < found.pages else ""
    return StoresPage(found=found, asked=asked, previous=before, following=after, now=now).response()


@router.endpoint("GET", "/{store}", access=LISTS)
def show_store(store: str, db: Db, asker: Asker, now: Now) -> Response:
    return _page(db, store, asker, now).response()


@router.endpoint("POST", "/{store}/limit", access=SERVER_ADMIN)
def set_limit(
    store: str,
    db: Db,
    asker: Asker,
    who: Who,
    now: Now,
    target: Text = "",
    limit: Text = "",
    writers: Text = "",
    fallback: Text = "",
    holds: Text = "",
) -> Response:
    typed = {"target": target, "limit": limit, "writers": writers, "fallback": fallback, "holds": holds}
    page = _page(db, store, asker, now)
    try:
        asked = NewStoreLimit(
            target=target or store, limit=limit, writers=_number(writers), fallback=fallback.strip() or None,
            holds=seconds("holds", holds),
        )  # fmt: skip
        control.set_limit(db, asked, who=who, now=now)
    except RequestRefused as refusal:
        shown = replace(page, refused=str(refusal), typed=typed)
        return shown.response(refusal.status, headers_of(refusal))
    return RedirectResponse(f"/stores/{store}", 303)


@router.endpoint("POST", "/{store}/limit/remove", access=SERVER_ADMIN)
def remove_limit(store: str, db: Db, asker: Asker, who: Who, now: Now) -> Response:
    limit = _page(db, store, asker, now).store.limit
    if limit is not None:
        control.remove_limit(db, limit.target, who=who, now=now)
    return RedirectResponse(f"/stores/{store}", 303)


@router.endpoint("POST", "/{store}/weight", access=SERVER_ADMIN)
def set_weight(
    store: str, db: Db, asker: Asker, who: Who, now: Now, job: Text = "", weight: Text = ""
) -> Response:
    page = _page(db, store, asker, now)
    try:
        control.set_weight(db, store, NewStoreWeight(job=job, weight=_weight(weight)), who=who, now=now)
    except RequestRefused as refusal:
        return replace(page, refused=str(refusal)).response(refusal.status, headers_of(refusal))
    return RedirectResponse(f"/stores/{store}", 303)


def _page(db: Database, store: str, asker: Principal, now: float) -> StorePage:
    with db.read() as session:
        found = stores.get(session, store, visible_projects=asker.visible_projects, now=now)
    limit = found.limit
    typed = {"target": found.id, "limit": "", "writers": "4", "fallback": "", "holds": "60 s"}
    if limit is not None:
        fallback = limit.fallback_bytes_per_second
        typed = {
            "target": limit.target,
            "limit": _speed(limit.bytes_per_second),
            "writers": str(limit.writers),
            "fallback": "" if fallback is None else _speed(fallback),
            "holds": f"{limit.holds_seconds:g} s",
        }
    return StorePage(store=found, may_change=asker.admin, typed=typed, now=now)


def _address(asked: StoreQuery, page: int) -> str:
    values = {"search": asked.search, "job": asked.job or "", "sort": asked.order, "page": str(page)}
    return f"/stores?{urlencode({name: value for name, value in values.items() if value})}"


def _speed(bytes_per_second: float) -> str:
    """Format a rate so that the form reads the same back."""
    return f"{bytes_per_second / 1e6:.12g}MB/s"


def _number(text: str) -> int:
    digits = text.strip()
    if not (digits.isascii() and digits.isdigit() and len(digits) < 6 and 1 <= int(digits) <= MAX_WRITERS):
        raise InvalidSetting("writers", f"give a number of checkpoints from 1 to {MAX_WRITERS:,}")
    return int(digits)


def _weight(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.01 <= value <= 100:
        raise InvalidSetting("weight", "give a weight from 0.01 to 100")
    return value
