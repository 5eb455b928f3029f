"""The reference of the API at /docs.

FastAPI's own page fetches its scripts from a CDN, which a training cluster cannot reach and our content
security policy forbids. This one is plain HTML from the same OpenAPI document.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

_STYLE = """
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

router = APIRouter(include_in_schema=False)


@router.get("/docs")
async def documentation(request: Request) -> Response:
    return HTMLResponse(_page(request.app.openapi(), icon=request.app.state.web is not None))


@router.get("/docs/style.css")
async def style() -> Response:
    return Response(_STYLE, media_type="text/css")


def _page(document: dict[str, Any], *, icon: bool) -> str:
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
