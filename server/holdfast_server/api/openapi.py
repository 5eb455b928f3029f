"""The OpenAPI document, with the msgspec structs of the API, and the reference at /docs.

FastAPI describes pydantic models only. Its own reference fetches scripts from a CDN, which a training cluster
cannot reach and our content security policy forbids; this one is plain HTML from the same document.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any, get_args, get_origin

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.routing import BaseRoute

from holdfast_server.api import examples
from holdfast_server.core.access import AccessRule

JSON = "application/json"
NO_CONTENT = 204
_REFERENCE = "#/components/schemas/{name}"
_described: set[Any] = set()


class ErrorAnswer(msgspec.Struct, kw_only=True, frozen=True):
    """The reason for refusing a request. Some errors have further fields."""

    error: str
    message: str


def answers_of(
    kind: Any, status: int, success: str, errors: Mapping[int, str] | None, media_type: str, example: Any
) -> dict[int | str, dict[str, Any]]:
    """Return `responses=` for a route that answers with `kind`, or with no body if that is `None`."""
    answers: dict[int | str, dict[str, Any]] = {}
    if kind is not None:
        content = {"schema": _schema(kind)}
        if example is not None or media_type == JSON:
            content["example"] = _named(kind) if example is None else example
        answers[status] = {"description": success, "content": {media_type: content}}
    elif status == NO_CONTENT:
        answers[status] = {"description": success}
    return answers | {code: {"description": meaning} for code, meaning in (errors or {}).items()}


def request_body(kind: Any) -> dict[str, Any]:
    """Return `openapi_extra=` for a route whose body is `kind`."""
    content = {"schema": _schema(kind), "example": examples.example_of(kind)}
    return {"requestBody": {"required": True, "content": {JSON: content}}}


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


def document_of(
    app: FastAPI, routes: Sequence[BaseRoute], access: Mapping[tuple[str, str], AccessRule]
) -> dict[str, Any]:
    """Return the OpenAPI document of an application's routes and their access rules."""
    document = get_openapi(title=app.title, version=app.version, description=app.description, routes=routes)
    _add_errors(document, access)
    _, components = msgspec.json.schema_components(list(_described), ref_template=_REFERENCE)
    document.setdefault("components", {}).setdefault("schemas", {}).update(components)
    return document


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


def _add_errors(document: dict[str, Any], access: Mapping[tuple[str, str], AccessRule]) -> None:
    """Add the errors that several routes share, with our schema instead of FastAPI's for invalid parameters."""
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            answers = operation["responses"]
            if access[method.upper(), path].audience != "public":
                _add(answers, _AUTH_ERRORS)
            if path.startswith("/api/"):
                _add(answers, _API_ERRORS)
                _add(answers, _BODY_ERRORS if "requestBody" in operation else {})
                _add(answers, {"404": "Not found, or hidden from you"} if "{" in path else {})
            for status, response in answers.items():
                if status.startswith(("4", "5")):
                    example = {"error": "not_found", "message": response["description"]}
                    response["content"] = {JSON: {"schema": _schema(ErrorAnswer), "example": example}}
    for name in ("HTTPValidationError", "ValidationError"):
        document.get("components", {}).get("schemas", {}).pop(name, None)


def _add(answers: dict[str, Any], more: dict[str, str]) -> None:
    for status, description in more.items():
        answers.setdefault(status, {"description": description})


REFERENCE_STYLE = """
:root { color-scheme: light dark; }
html { background: light-dark(#ffffff, #111b18); color: light-dark(#13211c, #e3ece8); }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
main { overflow-wrap: anywhere; }
a { color: light-dark(#0a7359, #43c59b); }
h2 { margin-top: 2.5rem; text-transform: capitalize; }
article { border-top: 1px solid color-mix(in srgb, currentcolor 20%, transparent); padding: .5rem 0 1rem; }
h3 { font: 600 1rem ui-monospace, monospace; overflow-wrap: anywhere; }
h3 span { display: inline-block; min-width: 4rem; }
dl { display: grid; grid-template-columns: fit-content(45%) 1fr; gap: .25rem 1rem; margin: .5rem 0; }
dt { font-family: ui-monospace, monospace; }
dd { margin: 0; min-width: 0; }
pre { overflow-x: auto; padding: .75rem; background: color-mix(in srgb, currentcolor 7%, transparent); }
"""


def reference_page(document: dict[str, Any], *, icon: bool) -> str:
    """Return the reference as HTML."""
    title = f"{escape(document['info']['title'])} {escape(document['info']['version'])}: HTTP API"
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<link rel="icon" href="/static/favicon.svg">' if icon else "",  # a file of the dashboard
            '<link rel="stylesheet" href="/docs/style.css">',
            f"<title>{title}</title></head><body><main>",
            f"<h1>{title}</h1><p>{escape(document['info']['description'])}</p>",
            '<p>For tools: <a href="/openapi.json">openapi.json</a>. Errors are ',
            "<code>{&quot;error&quot;: code, &quot;message&quot;: one sentence}</code>. Numbers that JSON cannot ",
            "express are the strings <code>nan</code>, <code>inf</code> and <code>-inf</code>.</p>",
            *_operations(document),
            "<h2>Objects</h2>",
            *_objects(document),
            "</main></body></html>",
        ]
    )


def _operations(document: dict[str, Any]) -> Iterator[str]:
    by_tag: dict[str, list[str]] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            by_tag.setdefault(operation["tags"][0], []).append(_operation(path, method, operation))
    for tag, operations in by_tag.items():
        yield f"<h2>{escape(tag)}</h2>"
        yield from operations


def _operation(path: str, method: str, operation: dict[str, Any]) -> str:
    parameters = [
        (f"{parameter['name']} ({parameter['in']})", parameter.get("description", ""))
        for parameter in operation.get("parameters", [])
    ]
    sent = operation.get("requestBody", {}).get("content", {})
    bodies = [("body", _type(content["schema"])) for content in sent.values()]
    answers = [
        (status, " ".join(filter(None, [_type_of(answer), escape(answer["description"])])))
        for status, answer in operation["responses"].items()
    ]
    return (
        f"<article><h3><span>{method.upper()}</span> {escape(path)}</h3>"
        f"<p>{escape(operation.get('description', operation['summary']))}</p>"
        f"{_list([(name, escape(text)) for name, text in parameters] + bodies)}{_list(answers)}</article>"
    )


def _list(entries: list[tuple[str, str]]) -> str:
    rows = "".join(f"<dt>{escape(term)}</dt><dd>{meaning}</dd>" for term, meaning in entries)
    return f"<dl>{rows}</dl>" if rows else ""


def _type_of(answer: dict[str, Any]) -> str:
    return _type(answer.get("content", {}).get("application/json", {}).get("schema", {}))


def _type(schema: dict[str, Any]) -> str:
    """Describe a schema in a few words, with links to its objects."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema:
        return " or ".join(_type(option) for option in schema["anyOf"])
    if "prefixItems" in schema:
        return f"[{', '.join(_type(item) for item in schema['prefixItems'])}]"
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    if isinstance(schema.get("additionalProperties"), dict):
        return f"names to {_type(schema['additionalProperties'])}"
    if "enum" in schema:
        return " | ".join(escape(str(value)) for value in schema["enum"])
    return escape(str(schema.get("type", "")))


def _objects(document: dict[str, Any]) -> Iterator[str]:
    for name, schema in sorted(document["components"]["schemas"].items()):
        if "properties" in schema:
            fields = [(field, _type(kind)) for field, kind in schema["properties"].items()]
            meaning = escape(schema.get("description", ""))
            yield f'<article id="{escape(name)}"><h3>{escape(name)}</h3><p>{meaning}</p>{_list(fields)}</article>'
