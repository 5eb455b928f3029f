"""People, keys and the audit log."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query
from starlette.requests import Request
from starlette.responses import Response

from holdfast.protocol.administration import AuditEntry, NewToken, Person, Token
from holdfast.protocol.field_types import MAX_INTEGER
from holdfast_server.accounts import people, tokens
from holdfast_server.accounts.tokens import TokenRequest
from holdfast_server.api.endpoints import Router
from holdfast_server.api.responses import Json, parse
from holdfast_server.core.access import ANY_PROJECT_ADMIN, LISTS, SERVER_ADMIN, AccessRule
from holdfast_server.core.errors import NotPossible
from holdfast_server.core.principal import Role
from holdfast_server.http.dependencies import Asker, Body, Db, Now
from holdfast_server.http.services import services_of
from holdfast_server.records import audit

MAX_BODY_BYTES = 2**14

router = Router("/api/v1", tag="accounts")


@router.endpoint("GET", "/people", access=SERVER_ADMIN, returns=dict[str, list[Person]])
def list_people(db: Db) -> Response:
    """List the people who may sign in."""
    return Json({"people": people.list_people(db)})


@router.endpoint("GET", "/tokens", access=LISTS, returns=dict[str, list[Token]])
def keys(db: Db, now: Now, asker: Asker) -> Response:
    """List the keys that you may revoke, newest first."""
    return Json({"tokens": tokens.list_tokens(db, asker=asker, now=now)})


@router.endpoint(
    "POST",
    "/tokens",
    # the route limits a new key to the rights of its maker
    access=AccessRule(audience="lists", recent_password=True),
    body=TokenRequest,
    returns=NewToken,
    status=201,
    errors={
        403: "The key would have more rights than you",
        404: "No such project",
        409: "The server has no accounts",
        422: "Invalid field",
    },
    max_body_bytes=MAX_BODY_BYTES,
)
def create(request: Request, body: Body, db: Db, now: Now, asker: Asker) -> Response:
    """Make a key with at most your own rights. Only this answer contains its secret."""
    asked = parse(body, TokenRequest)
    if not services_of(request.app).auth.has_accounts:
        raise NotPossible("this server has no accounts and no keys: start it with `holdfast serve --accounts`")
    secret, token = tokens.create(db, asked, maker=asker, now=now)
    return Json(NewToken(token=secret, listed=token), status_code=201)


@router.endpoint(
    "POST",
    "/tokens/{prefix}/revoke",
    access=LISTS,  # an unknown key and another person's look the same
    returns=Token,
    errors={404: "No such key"},
)
def revoke(prefix: str, db: Db, now: Now, asker: Asker) -> Response:
    """Revoke a key. All instances reject it within 5 seconds."""
    return Json(tokens.revoke(db, prefix, asker=asker, now=now))


@router.endpoint("GET", "/audit", access=ANY_PROJECT_ADMIN, returns=dict[str, list[AuditEntry]])
def log(
    db: Db,
    asker: Asker,
    who: str = "",
    action: Annotated[str, Query(description="an action, or its first word, as in `key`")] = "",
    job: str = "",
    project: str = "",
    older_than: Annotated[int | None, Query(ge=0, le=MAX_INTEGER, description="only rows before this one")] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> Response:
    """List changes, newest first: of the whole server, or of the projects in which you are an admin."""
    question = audit.AuditQuery(
        who=who, action=action, job=job, project=project, older_than=older_than,
        visible_projects=asker.projects_with_role(Role.admin),
    )  # fmt: skip
    with db.read() as session:
        return Json({"entries": audit.entries(session, question, limit=limit)})
