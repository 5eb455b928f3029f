"""The msgspec structs of the API in the OpenAPI document: FastAPI supports pydantic models only."""

from __future__ import annotations

from typing import Any, get_args, get_origin

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from holdfast_server.accounts import policy
from holdfast_server.api import examples

_REFERENCE = "#/components/schemas/{name}"
_described: set[Any] = set()


class ErrorAnswer(msgspec.Struct, kw_only=True, frozen=True):
    """The reason for refusing a request. Some errors have further fields."""

    error: str
    message: str


def returns(kind: Any, status: int = 200, **others: str) -> dict[int | str, dict[str, Any]]:
    """Return `responses=` for a route that answers with `kind`, or `None` without; `_404="why"` adds an error."""
    answers: dict[int | str, dict[str, Any]] = {status: {"description": "Success"}}
    if kind is not None:
        content = {"schema": _schema(kind), "example": _named(kind)}
        answers[status]["content"] = {"application/json": content}
    return answers | {
        int(name.removeprefix("_")): {"description": description} for name, description in others.items()
    }


def body(kind: Any) -> dict[str, Any]:
    """Return `openapi_extra=` for a route whose body is `kind`."""
    content = {"schema": _schema(kind), "example": examples.example_of(kind)}
    return {"requestBody": {"required": True, "content": {"application/json": content}}}


_ROWS = {
    "Alert": "alerts", "AlertChannel": "channels", "AttemptSummary": "attempts",
    "CheckpointInfo": "checkpoints", "AlertDelivery": "deliveries",
    "Edit": "edits", "AuditEntry": "entries", "NoticeInfo": "notices", "Order": "restores", "Person": "people",
    "AlertRule": "rules", "Token": "tokens",
}  # fmt: skip
"""Name of the list in an answer with several of them."""


def _named(kind: Any) -> Any:
    """Return an example of an answer. Lists are wrapped in an object, so that fields can be added later."""
    inner = get_args(get_args(kind)[1]) if get_origin(kind) is dict else ()
    if inner and inner[0].__name__ in _ROWS:
        return {_ROWS[inner[0].__name__]: [examples.example_of(inner[0])]}
    return examples.example_of(kind)


def _schema(kind: Any) -> dict[str, Any]:
    _described.add(kind)
    (schema,), _ = msgspec.json.schema_components([kind], ref_template=_REFERENCE)
    return schema


def install(app: FastAPI) -> None:
    """Add the structs that routes use to /openapi.json."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(
                title=app.title, version=app.version, description=app.description, routes=app.routes
            )
            _add_errors(document)
            _, components = msgspec.json.schema_components(list(_described), ref_template=_REFERENCE)
            document.setdefault("components", {}).setdefault("schemas", {}).update(components)
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


_AUTH_ERRORS = {
    "401": "Not authenticated, invalid key, or the password was entered too long ago",
    "403": "Permission denied, or cross-origin request",
}
"""Errors of every route that is not public."""
_API_ERRORS = {
    "421": "Unknown host name",
    "429": "Too many requests: see Retry-After",
    "503": "The database is busy or shutting down: see Retry-After",
    "507": "The server's disk is full",
}
"""Errors of every route under /api."""
_BODY_ERRORS = {
    "408": "The body did not arrive in time",
    "413": "The body is too large",
    "422": "Invalid body",
}


def _add_errors(document: dict[str, Any]) -> None:
    """Add the errors that several routes share, with our schema instead of FastAPI's for invalid parameters."""
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            answers = operation["responses"]
            if policy.TABLE[method.upper(), path].audience != "public":
                _add(answers, _AUTH_ERRORS)
            if path.startswith("/api/"):
                _add(answers, _API_ERRORS)
                _add(answers, _BODY_ERRORS if "requestBody" in operation else {})
                _add(answers, {"404": "Not found, or hidden from you"} if "{" in path else {})
            for status, response in answers.items():
                if status.startswith(("4", "5")):
                    example = {"error": "not_found", "message": response["description"]}
                    response["content"] = {
                        "application/json": {"schema": _schema(ErrorAnswer), "example": example}
                    }
    for name in ("HTTPValidationError", "ValidationError"):
        document.get("components", {}).get("schemas", {}).pop(name, None)


def _add(answers: dict[str, Any], more: dict[str, str]) -> None:
    for status, description in more.items():
        answers.setdefault(status, {"description": description})
