"""The list of stores, and the page of one with its limit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from fastapi.responses import RedirectResponse, Response

from holdfast.protocol.stores import MAX_WRITERS, NewStoreLimit, NewStoreWeight, StoreInfo
from holdfast_server.api.endpoints import Router
from holdfast_server.control import stores
from holdfast_server.core.access import LISTS, SERVER_ADMIN
from holdfast_server.core.errors import InvalidSetting, RequestRefused
from holdfast_server.core.principal import Principal
from holdfast_server.db import Database
from holdfast_server.http.dependencies import Asker, Db, Now, Who
from holdfast_web.shared.forms import seconds
from holdfast_web.shared.render import View
from holdfast_web.shared.routing import Text, headers_of

router = Router("/stores")

StoreSort = Literal["load", "address"]
"""`load`: highest share of the limit first, those without one by their rate."""


@dataclass(frozen=True, kw_only=True)
class StoresPage(View):
    template: ClassVar[str] = "stores/stores.html"
    stores: list[StoreInfo]
    job: str
    """Only those that this job writes to; empty for all."""
    sort: StoreSort
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
def list_stores(db: Db, asker: Asker, now: Now, job: str = "", sort: StoreSort = "load") -> Response:
    with db.read() as session:
        found = stores.stores(session, visible_projects=asker.visible_projects, now=now)
    if job:
        found = [store for store in found if any(each.job == job for each in store.writers)]
        if len(found) == 1:
            return RedirectResponse(f"/stores/{found[0].id}", 303)
    if sort == "address":
        found.sort(key=lambda store: store.address)
    else:
        found.sort(key=lambda store: (store.load or 0.0, store.bytes_per_second), reverse=True)
    return StoresPage(stores=found, job=job, sort=sort, now=now).response()


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
        stores.set_limit(db, asked, who=who, now=now)
    except RequestRefused as refusal:
        shown = replace(page, refused=str(refusal), typed=typed)
        return shown.response(refusal.status, headers_of(refusal))
    return RedirectResponse(f"/stores/{store}", 303)


@router.endpoint("POST", "/{store}/limit/remove", access=SERVER_ADMIN)
def remove_limit(store: str, db: Db, asker: Asker, who: Who, now: Now) -> Response:
    limit = _page(db, store, asker, now).store.limit
    if limit is not None:
        stores.remove_limit(db, limit.target, who=who, now=now)
    return RedirectResponse(f"/stores/{store}", 303)


@router.endpoint("POST", "/{store}/weight", access=SERVER_ADMIN)
def set_weight(
    store: str, db: Db, asker: Asker, who: Who, now: Now, job: Text = "", weight: Text = ""
) -> Response:
    page = _page(db, store, asker, now)
    try:
        stores.set_weight(db, store, NewStoreWeight(job=job, weight=_weight(weight)), who=who, now=now)
    except RequestRefused as refusal:
        return replace(page, refused=str(refusal)).response(refusal.status, headers_of(refusal))
    return RedirectResponse(f"/stores/{store}", 303)


def _page(db: Database, store: str, asker: Principal, now: float) -> StorePage:
    with db.read() as session:
        (found,) = stores.stores(session, visible_projects=asker.visible_projects, now=now, only=store)
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
