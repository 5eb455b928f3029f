"""Pages of the guide, their files, and the search."""

from __future__ import annotations

from dataclasses import dataclass
from mimetypes import guess_type
from typing import Annotated, ClassVar

from fastapi import Query
from fastapi.responses import RedirectResponse, Response
from markupsafe import Markup
from starlette.exceptions import HTTPException

from holdfast_server.api.endpoints import Router
from holdfast_server.core.access import PERSON
from holdfast_web.guide.pages import Guide, Result, built_guide, search
from holdfast_web.shared.render import View

MAX_QUERY = 200

router = Router("/guide")


@dataclass(frozen=True, kw_only=True)
class GuidePage(View):
    template: ClassVar[str] = "guide/page.html"
    guide: Guide
    name: str
    title: str
    body: Markup
    contents: Markup
    previous: str | None
    next: str | None
    query: str = ""


@dataclass(frozen=True, kw_only=True)
class SearchPage(View):
    template: ClassVar[str] = "guide/search.html"
    guide: Guide
    query: str
    results: list[Result]
    name: str = ""


@dataclass(frozen=True, kw_only=True)
class MissingGuide(View):
    template: ClassVar[str] = "guide/missing.html"


@router.endpoint("GET", "", access=PERSON)
def index() -> Response:
    return RedirectResponse("/guide/")


@router.endpoint("GET", "/search", access=PERSON)
def find(query: Annotated[str, Query(alias="q", max_length=MAX_QUERY)] = "") -> Response:
    guide = built_guide()
    if guide is None:
        return MissingGuide().response()
    return SearchPage(guide=guide, query=query.strip(), results=search(guide, query)).response()


@router.endpoint("GET", "/{path:path}", access=PERSON)
def show(path: str) -> Response:
    """Answer with a page or one of its files. Pages refer to each other as folders: `../install/`."""
    guide = built_guide()
    if guide is None:
        return MissingGuide().response()
    if path in guide.files:
        return Response(guide.files[path], media_type=guess_type(path)[0] or "text/plain")
    name = path.rstrip("/") or "index"
    if name not in guide.pages:
        raise HTTPException(404, f"The guide has no page {name!r}")
    if path and not path.endswith("/"):
        return RedirectResponse(guide.address(name))
    previous, following = guide.beside(name)
    page = guide.pages[name]
    return GuidePage(
        guide=guide,
        name=name,
        title=page.title,
        body=Markup(page.body),  # noqa: S704 - built from our documentation, not from what anybody sends
        contents=Markup(page.contents),  # noqa: S704
        previous=previous,
        next=following,
    ).response()
