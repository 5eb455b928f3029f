"""Stores that jobs share, and their write limits."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query
from starlette.responses import Response

from holdfast.protocol.field_types import MAX_INTEGER
from holdfast.protocol.stores import NewStoreLimit, NewStoreWeight, StoreInfo, StoreLimit, StoreList
from holdfast_server.api.desired_state import MAX_EDIT_BYTES
from holdfast_server.api.endpoints import Router
from holdfast_server.api.responses import Json, parse
from holdfast_server.control import stores as control
from holdfast_server.core.access import LISTS, SERVER_ADMIN
from holdfast_server.http.dependencies import Asker, Body, Db, Now, Who
from holdfast_server.queries import stores

router = Router("/api/v1", tag="control")


@router.endpoint("GET", "/stores", access=LISTS, returns=StoreList)
def list_stores(
    db: Db,
    asker: Asker,
    now: Now,
    search: Annotated[str, Query(description="part of an address, case-insensitive, or an id")] = "",
    job: Annotated[str | None, Query(description="only stores that this job writes to")] = None,
    sort: Annotated[
        stores.StoreSort, Query(description="`load`: the highest rate first, then the most waiting bytes")
    ] = "load",
    page: Annotated[int, Query(ge=1, le=MAX_INTEGER)] = 1,
    size: Annotated[int, Query(ge=1, le=stores.MOST_ROWS, description="stores per page")] = stores.PAGE_ROWS,
) -> Response:
    """List one page of the stores that your jobs write to, with rate, waiting bytes and free space."""
    question = stores.StoreQuery(
        search=search, job=job, order=sort, page=page, size=size, visible_projects=asker.visible_projects
    )
    with db.read() as session:
        return Json(stores.find(session, question, now=now))


@router.endpoint("GET", "/stores/{store}", access=LISTS, returns=StoreInfo, errors={404: "No such store"})
def get_store(store: str, db: Db, asker: Asker, now: Now) -> Response:
    """Return a store by its id, with the jobs that write to it."""
    with db.read() as session:
        return Json(stores.get(session, store, visible_projects=asker.visible_projects, now=now))


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
    """Set a job's weight in the division of a limit; the default is 1."""
    control.set_weight(db, store, parse(body, NewStoreWeight), who=who, now=now)
    with db.read() as session:
        return Json(stores.get(session, store, visible_projects=asker.visible_projects, now=now))


@router.endpoint("GET", "/store-limits", access=LISTS, returns=dict[str, list[StoreLimit]])
def list_limits(db: Db, asker: Asker) -> Response:
    """List the write limits of stores: all, or those of stores that you may see."""
    with db.read() as session:
        return Json({"limits": stores.limits(session, visible_projects=asker.visible_projects)})


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
    return Json(control.set_limit(db, parse(body, NewStoreLimit), who=who, now=now))


@router.endpoint("DELETE", "/store-limits", access=SERVER_ADMIN, status=204)
def remove_limit(db: Db, who: Who, now: Now, target: Annotated[str, Query(max_length=500)]) -> Response:
    """Remove a limit."""
    control.remove_limit(db, target, who=who, now=now)
    return Response(status_code=204)
