"""Our structs in the OpenAPI document: FastAPI knows pydantic's models only."""

from __future__ import annotations

from typing import Any, get_args, get_origin

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from holdfast_server.accounts import policy
from holdfast_server.api import examples

_REFERENCE = "#/components/schemas/{name}"
_described: set[Any] = set()


class Refusal(msgspec.Struct, kw_only=True, frozen=True):
    """Why a request was refused, and the way out; some refusals tell more."""

    error: str
    message: str


def returns(kind: Any, status: int = 200, **others: str) -> dict[int | str, dict[str, Any]]:
    """`responses=` of a route that answers with `kind`, and `_404="why"` for what else it may answer."""
    content = {"schema": _schema(kind), "example": _named(kind)}
    answers: dict[int | str, dict[str, Any]] = {
        status: {"description": "Success", "content": {"application/json": content}}
    }
    return answers | {
        int(name.removeprefix("_")): {"description": description} for name, description in others.items()
    }


def body(kind: Any) -> dict[str, Any]:
    """`openapi_extra=` of a route that reads `kind`."""
    content = {"schema": _schema(kind), "example": examples.example_of(kind)}
    return {"requestBody": {"required": True, "content": {"application/json": content}}}


_ROWS = {
    "Alert": "alerts", "AlertChannel": "channels", "CheckpointRow": "checkpoints", "AlertDelivery": "deliveries",
    "Edit": "edits", "AuditEntry": "entries", "NoticeRow": "notices", "Order": "restores", "PersonRow": "people",
    "AlertRule": "rules", "TokenRow": "tokens",
}  # fmt: skip
"""Under which name a list of these is answered."""


def _named(kind: Any) -> Any:
    """An example of an answer; lists are answered under a name, so that more can be told beside them one day."""
    inner = get_args(get_args(kind)[1]) if get_origin(kind) is dict else ()
    if inner and inner[0].__name__ in _ROWS:
        return {_ROWS[inner[0].__name__]: [examples.example_of(inner[0])]}
    return examples.example_of(kind)


def _schema(kind: Any) -> dict[str, Any]:
    _described.add(kind)
    (schema,), _ = msgspec.json.schema_components([kind], ref_template=_REFERENCE)
    return schema


def install(app: FastAPI) -> None:
    """Have /openapi.json describe the structs that routes were declared with."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(
                title=app.title, version=app.version, description=app.description, routes=app.routes
            )
            _say_what_we_refuse(document)
            _, components = msgspec.json.schema_components(list(_described), ref_template=_REFERENCE)
            document.setdefault("components", {}).setdefault("schemas", {}).update(components)
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


_AT_THE_DOOR = {
    "401": "Nobody has said who asks, the key does not work, or the sign-in was too long ago",
    "403": "Whoever asks may not, or the request comes from another site",
}
"""What any route may answer that is not for everybody."""
_ANYWHERE = {
    "421": "The server does not answer to this name",
    "429": "Too much at once: Retry-After says when to come back",
    "503": "The database is busy or stopping: Retry-After says when to come back",
    "507": "The disk of the server is full",
}
"""What any route under /api may answer."""
_WITH_A_BODY = {
    "408": "The body did not come in time",
    "413": "The body is larger than the server takes",
    "422": "The body is not what this route reads",
}


def _say_what_we_refuse(document: dict[str, Any]) -> None:
    """Every refusal has our shape; FastAPI writes down its own for parameters that cannot be."""
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            answers = operation["responses"]
            if policy.TABLE[method.upper(), path].where != "anybody":
                _add(answers, _AT_THE_DOOR)
            if path.startswith("/api/"):
                _add(answers, _ANYWHERE)
                _add(answers, _WITH_A_BODY if "requestBody" in operation else {})
                _add(answers, {"404": "Nothing here, or not for whoever asks"} if "{" in path else {})
            for status, response in answers.items():
                if status.startswith(("4", "5")):
                    example = {"error": "not_found", "message": response["description"]}
                    response["content"] = {"application/json": {"schema": _schema(Refusal), "example": example}}
    for name in ("HTTPValidationError", "ValidationError"):
        document.get("components", {}).get("schemas", {}).pop(name, None)


def _add(answers: dict[str, Any], more: dict[str, str]) -> None:
    for status, description in more.items():
        answers.setdefault(status, {"description": description})
