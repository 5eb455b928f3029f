"""Templates with typed contexts: a page or a fragment is a dataclass that names its template."""

from __future__ import annotations

from dataclasses import dataclass, fields
from importlib.resources import files
from typing import Any, ClassVar

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from starlette.responses import HTMLResponse

from holdfast_server.accounts.principal import Role, current
from holdfast_web.shared.assets import imports_of, static_url
from holdfast_web.shared.filters import FILTERS

HEADERS = {"Cache-Control": "no-store", "Vary": "HX-Request"}
"""A page holds what was true when it was rendered, and the same URL may answer with a fragment."""


def _sees(project: str) -> bool:
    """Whether a job of the project may be named to whoever asked."""
    return current.get().role_in(project) is not None


def _module(script: str) -> Markup:
    """The tags that load a script; what it imports is loaded at the same time."""
    preloads = "".join(f'<link rel="modulepreload" href="{static_url(path)}">' for path in imports_of(script))
    return Markup(f'{preloads}<script src="{static_url(script)}" type="module"></script>')  # noqa: S704 - our paths


_environment = Environment(
    loader=FileSystemLoader(str(files("holdfast_web"))),
    autoescape=True,
    auto_reload=False,  # to look at the files of thirty templates takes a page milliseconds
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_environment.filters.update(FILTERS)
_environment.globals["static"] = static_url
_environment.globals["module"] = _module
_environment.globals["me"] = current.get
"""Whoever asked for the page."""
_environment.globals["sees"] = _environment.tests["visible"] = _sees
_environment.globals["operates"] = lambda project: (current.get().role_in(project) or 0) >= Role.operator
"""Whether they may change what a job of the project is to do: what they may not do is not offered to them."""
_environment.globals["administers"] = lambda project: (current.get().role_in(project) or 0) >= Role.admin
"""Whether they may delete a job of the project."""


def values(view: View) -> dict[str, Any]:
    """The fields by name, as they are."""
    return {field.name: getattr(view, field.name) for field in fields(view)}


@dataclass(frozen=True, kw_only=True)
class View:
    """What a template may use: the fields of its view, the filters, the globals above. All else is an error."""

    template: ClassVar[str]
    page_template: ClassVar[str] = ""
    """Of a part of a page that can also be a page of its own."""

    def html(self, template: str = "") -> str:
        return _environment.get_template(template or self.template).render(values(self))

    __html__ = html
    """A view inside another template is HTML already: Jinja asks for this before it escapes."""

    def response(
        self, status: int = 200, headers: dict[str, str] | None = None, *, template: str = ""
    ) -> HTMLResponse:
        """`template`: another one that shows the same fields."""
        return HTMLResponse(self.html(template), status, HEADERS | (headers or {}))

    def page(self, status: int = 200) -> HTMLResponse:
        return self.response(status, template=self.page_template)
