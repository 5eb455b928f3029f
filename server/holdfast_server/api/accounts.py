"""People, keys and the audit log, for programs."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from holdfast.protocol.administration import AuditEntry, NewToken, PersonRow, TokenRow
from holdfast.protocol.messages import MAX_INTEGER
from holdfast_server.accounts import people, tokens
from holdfast_server.api.openapi import body, returns
from holdfast_server.api.responses import Json, parse
from holdfast_server.core.errors import NotPossible
from holdfast_server.core.principal import Role, Scope
from holdfast_server.http.dependencies import Asker, Clock, Db
from holdfast_server.records import audit

MAX_BODY_BYTES = 2**14

router = APIRouter(tags=["accounts"])


class TokenRequest(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What a new key is to be for."""

    name: str
    scopes: list[Scope]
    project: str | None = None
    """null: every project."""
    job: str | None = None
    """null: every job of the project."""
    seconds: float | None = None
    """How long it works; null: until it is revoked."""


@router.get("/people", responses=returns(dict[str, list[PersonRow]]))
async def everybody(db: Db) -> Response:
    return Json({"people": await people.rows(db)})


@router.get("/tokens", responses=returns(dict[str, list[TokenRow]]))
async def keys(db: Db, clock: Clock, asker: Asker) -> Response:
    """Those that the asker may revoke, the newest first."""
    return Json({"tokens": await tokens.rows(db, asker=asker, now=clock())})


@router.post(
    "/tokens",
    status_code=201,
    max_body_size=MAX_BODY_BYTES,
    openapi_extra=body(TokenRequest),
    responses=returns(
        NewToken, 201, _403="It would do more than its maker may", _404="No such project", _409="No accounts here",
        _422="Not a key",
    ),
)  # fmt: skip
async def create(request: Request, db: Db, clock: Clock, asker: Asker) -> Response:
    """Make a key. It is told here and never again; what it may do never exceeds what its maker may."""
    asked = parse(await request.body(), TokenRequest)
    if not request.app.state.door.accounts:
        raise NotPossible("this server has no accounts, and so no keys: start it with `holdfast serve --accounts`")
    wish = tokens.Wish(
        name=asked.name, scopes=asked.scopes, project=asked.project, job=asked.job, seconds=asked.seconds
    )
    secret, row = await tokens.create(db, wish, maker=asker, now=clock())
    return Json(NewToken(token=secret, listed=row), status_code=201)


@router.post("/tokens/{prefix}/revoke", responses=returns(TokenRow, _404="No such key"))
async def revoke(prefix: str, db: Db, clock: Clock, asker: Asker) -> Response:
    """No instance takes it 5 seconds later. Revoked twice is revoked."""
    return Json(await tokens.revoke(db, prefix, asker=asker, now=clock()))


@router.get("/audit", responses=returns(dict[str, list[AuditEntry]]))
async def log(
    db: Db,
    asker: Asker,
    who: str = "",
    action: Annotated[str, Query(description="or the first word of one, as in `key`")] = "",
    job: str = "",
    project: str = "",
    older_than: Annotated[int | None, Query(ge=0, le=MAX_INTEGER, description="only rows before this one")] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> Response:
    """What was changed, the newest first: of everything, or of the projects that the asker is an admin of."""
    question = audit.Question(
        who=who, action=action, job=job, project=project, older_than=older_than,
        visible_projects=asker.projects_as(Role.admin),
    )  # fmt: skip
    async with db.read() as session:
        return Json({"entries": await audit.entries(session, question, limit=limit)})
