"""Templates with typed contexts: a page or a fragment is a dataclass that names its template."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from importlib.resources import files
from typing import Any, ClassVar

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from starlette.responses import HTMLResponse

from holdfast.protocol.verdicts import VerdictLevel
from holdfast_server.core.principal import Role, current_principal
from holdfast_web.shared.assets import static_url
from holdfast_web.shared.filters import FILTERS
from holdfast_web.shared.glossary import TERMS

HEADERS = {"Cache-Control": "no-store", "Vary": "HX-Request"}
"""Pages are never cached, and the same URL can answer with a fragment."""


def _sees(project: str) -> bool:
    """Return whether the asker may see jobs of the project."""
    return current_principal.get().role_in(project) is not None


def _operates(project: str) -> bool:
    """Return whether the asker may change jobs of the project."""
    return (current_principal.get().role_in(project) or 0) >= Role.operator


def _term(name: str) -> Markup:
    """Return a term with its definition as a tooltip."""
    return Markup('<span class="term" title="{}">{}</span>').format(TERMS[name], name)


def _help_link(place: str, subject: str) -> Markup:
    """Return a link to the page of the guide, as in `goodput#stalls`, that explains a panel."""
    page, _, anchor = place.partition("#")
    address = f"/guide/{page}/{'#' if anchor else ''}{anchor}"
    return Markup('<a class="help" href="{}" title="Guide" aria-label="Guide: {}">?</a>').format(address, subject)


_MARKS: dict[VerdictLevel, str] = {"critical": "✗ ", "warning": "! "}
"""What precedes the title of a page."""


def _tab_title(level: VerdictLevel, name: str) -> str:
    """Return the title of a page that shows a verdict."""
    return f"{_MARKS.get(level, '')}{name} · Holdfast"


def tab_icon(level: VerdictLevel) -> str:
    """Return the address of the icon of a page that shows a verdict."""
    return static_url("favicon.svg" if level == "good" else f"favicon-{level}.svg")


def _tab_state(level: VerdictLevel, name: str) -> Markup:
    """Return the attributes from which a live page updates its title and its icon."""
    return Markup(' data-title="{}" data-icon="{}"').format(_tab_title(level, name), tab_icon(level))


_environment = Environment(
    loader=FileSystemLoader(str(files("holdfast_web"))),
    autoescape=True,
    auto_reload=False,  # checking the files of thirty templates would cost milliseconds per page
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_environment.filters.update(FILTERS)
_environment.globals["static"] = static_url
_environment.tests["no_number"] = lambda value: value is not None and not math.isfinite(value)
_environment.globals["term"], _environment.globals["help_link"] = _term, _help_link
_environment.globals["tab_title"], _environment.globals["tab_icon"] = _tab_title, tab_icon
_environment.globals["tab_state"] = _tab_state
_environment.globals["me"] = current_principal.get
_environment.globals["sees"] = _environment.tests["visible"] = _sees
_environment.globals["operates"] = _environment.tests["operated"] = _operates
_environment.globals["administers"] = lambda project: (current_principal.get().role_in(project) or 0) >= Role.admin


def values(view: View) -> dict[str, Any]:
    """Return the fields by name, without copying."""
    return {field.name: getattr(view, field.name) for field in fields(view)}


@dataclass(frozen=True, kw_only=True)
class View:
    """The variables of a template, next to the filters and the globals; other names are errors."""

    template: ClassVar[str]
    page_template: ClassVar[str] = ""
    """The template of the full page, for a part that is also a page."""

    def html(self, template: str = "") -> str:
        return _environment.get_template(template or self.template).render(values(self))

    __html__ = html
    """Let Jinja include a view in another template without escaping it."""

    def response(
        self, status: int = 200, headers: dict[str, str] | None = None, *, template: str = ""
    ) -> HTMLResponse:
        return HTMLResponse(self.html(template), status, HEADERS | (headers or {}))

    def page(self, status: int = 200) -> HTMLResponse:
        return self.response(status, template=self.page_template)

    def part_or_page(self, htmx: bool, status: int = 200) -> HTMLResponse:
        """Return the part for a request by htmx, else its full page."""
        return self.response(status) if htmx else self.page(status)
