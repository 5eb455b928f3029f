"""Stores that jobs share, and limits for what they write there."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query
from starlette.responses import Response

from holdfast.protocol.stores import NewStoreLimit, NewStoreWeight, StoreInfo, StoreLimit
from holdfast_server.api.desired_state import MAX_EDIT_BYTES
from holdfast_server.api.endpoints import Router
from holdfast_server.api.responses import Json, parse
from holdfast_server.control import stores
from holdfast_server.core.access import LISTS, SERVER_ADMIN
from holdfast_server.http.dependencies import Asker, Body, Db, Now, Who

router = Router("/api/v1", tag="control")


@router.endpoint("GET", "/stores", access=LISTS, returns=dict[str, list[StoreInfo]])
def list_stores(db: Db, asker: Asker, now: Now) -> Response:
    """List the stores that your jobs write to, with who writes how much and what waits."""
    with db.read() as session:
        return Json({"stores": stores.stores(session, visible_projects=asker.visible_projects, now=now)})


@router.endpoint("GET", "/stores/{store}", access=LISTS, returns=StoreInfo, errors={404: "No such store"})
def get_store(store: str, db: Db, asker: Asker, now: Now) -> Response:
    """Return a store by its id."""
    with db.read() as session:
        return Json(stores.stores(session, visible_projects=asker.visible_projects, now=now, only=store)[0])


@router.endpoint(
    "PUT",
    "/stores/{store}/weights",
    access=SERVER_ADMIN,
    body=NewStoreWeight,
    returns=StoreInfo,
    errors={404: "No such store, or the job does not write there", 422: "Invalid weight"},
    max_body_bytes=MAX_EDIT_BYTES,
)
def set_weight(store: str, body: Body, db: Db, asker: Asker, who: Who, now: Now) -> Response:
    """Set the weight of a job in the division of a limit; 1 unless it was set."""
    stores.set_weight(db, store, parse(body, NewStoreWeight), who=who, now=now)
    with db.read() as session:
        return Json(stores.stores(session, visible_projects=asker.visible_projects, now=now, only=store)[0])


@router.endpoint("GET", "/store-limits", access=LISTS, returns=dict[str, list[StoreLimit]])
def list_limits(db: Db, asker: Asker, now: Now) -> Response:
    """List the limits for what jobs write to stores: all, or those of stores that you may see."""
    with db.read() as session:
        found = stores.limits(session)
        if asker.visible_projects is not None:
            seen = stores.stores(session, visible_projects=asker.visible_projects, now=now)
            targets = {store.limit.target for store in seen if store.limit is not None}
            found = [limit for limit in found if limit.target in targets]
        return Json({"limits": found})


@router.endpoint(
    "PUT",
    "/store-limits",
    access=SERVER_ADMIN,
    body=NewStoreLimit,
    returns=StoreLimit,
    errors={422: "Invalid limit"},
    max_body_bytes=MAX_EDIT_BYTES,
)
def set_limit(body: Body, db: Db, who: Who, now: Now) -> Response:
    """Limit what all jobs together write to a store, or to all stores below an address."""
    return Json(stores.set_limit(db, parse(body, NewStoreLimit), who=who, now=now))


@router.endpoint("DELETE", "/store-limits", access=SERVER_ADMIN, status=204)
def remove_limit(db: Db, who: Who, now: Now, target: Annotated[str, Query(max_length=500)]) -> Response:
    """Remove a limit."""
    stores.remove_limit(db, target, who=who, now=now)
    return Response(status_code=204)
