"""Our structs in the OpenAPI document: FastAPI knows pydantic's models only."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

_REFERENCE = "#/components/schemas/{name}"
_described: set[Any] = set()


class Refusal(msgspec.Struct, kw_only=True, frozen=True):
    """Why a request was refused, and the way out; some refusals tell more."""

    error: str
    message: str


def returns(kind: Any, status: int = 200, **others: str) -> dict[int | str, dict[str, Any]]:
    """`responses=` of a route that answers with `kind`, and `_404="why"` for what else it may answer."""
    answers: dict[int | str, dict[str, Any]] = {
        status: {"description": "Success", "content": {"application/json": {"schema": _schema(kind)}}}
    }
    return answers | {
        int(name.removeprefix("_")): {"description": description} for name, description in others.items()
    }


def body(kind: Any) -> dict[str, Any]:
    """`openapi_extra=` of a route that reads `kind`."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": _schema(kind)}}}}


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


def _say_what_we_refuse(document: dict[str, Any]) -> None:
    """Every refusal has our shape; FastAPI writes down its own for parameters that cannot be."""
    answer = {"application/json": {"schema": _schema(Refusal)}}
    for methods in document["paths"].values():
        for operation in methods.values():
            for status, response in operation["responses"].items():
                if status.startswith(("4", "5")):
                    response["content"] = answer
    for name in ("HTTPValidationError", "ValidationError"):
        document.get("components", {}).get("schemas", {}).pop(name, None)
