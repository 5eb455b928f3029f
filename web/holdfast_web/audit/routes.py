"""The audit log as a page, and as CSV and JSON files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal
from urllib.parse import urlencode

import msgspec
from fastapi import Depends, Query
from fastapi.responses import Response, StreamingResponse

from holdfast.protocol.administration import AuditEntry
from holdfast.protocol.field_types import MAX_INTEGER
from holdfast_server.api.endpoints import Router
from holdfast_server.core.access import ANY_PROJECT_ADMIN
from holdfast_server.core.principal import Role
from holdfast_server.db import Database
from holdfast_server.http.dependencies import Asker, Db, Now
from holdfast_server.queries.exports import csv_bytes, csv_cell
from holdfast_server.records import audit
from holdfast_server.records.audit import AuditQuery
from holdfast_web.shared.filters import iso
from holdfast_web.shared.render import View

SHOWN, EXPORTED_AT_ONCE = 100, 1000
COLUMNS = ("id", "at", "who", "action", "project", "job", "before", "after", "request_id", "digest")
LINE_END = "\r\n"
"""So that the CSV writer quotes a cell that contains either character."""

router = Router("/audit")


@dataclass(frozen=True, kw_only=True)
class AuditPage(View):
    template: ClassVar[str] = "audit/audit.html"
    entries: list[AuditEntry]
    filters: dict[str, str]
    """The filters by name."""
    actions: list[str]
    older: int | None
    """The row before which the next page starts; None on the last page."""
    query: str
    """The filters as a query string."""
    now: float


async def _question(
    asker: Asker,
    who: str = "",
    action: str = "",
    job: str = "",
    project: str = "",
    older_than: Annotated[int | None, Query(ge=0, le=MAX_INTEGER)] = None,
) -> AuditQuery:
    return AuditQuery(
        who=who.strip(),
        action=action.strip(),
        job=job.strip(),
        project=project.strip(),
        older_than=older_than,
        visible_projects=asker.projects_with_role(Role.admin),
    )


Asked = Annotated[AuditQuery, Depends(_question)]


@router.endpoint("GET", "", access=ANY_PROJECT_ADMIN)
def log(db: Db, now: Now, asked: Asked) -> Response:
    with db.read() as session:
        found = audit.entries(session, asked, limit=SHOWN + 1)
    filters = {"who": asked.who, "action": asked.action, "job": asked.job, "project": asked.project}
    page = AuditPage(
        entries=found[:SHOWN],
        filters=filters,
        query=urlencode({name: value for name, value in filters.items() if value}),
        actions=list(audit.KINDS),
        older=found[SHOWN - 1].id if len(found) > SHOWN else None,
        now=now,
    )
    return page.response()


@router.endpoint("GET", "/export", access=ANY_PROJECT_ADMIN)
def export(db: Db, asked: Asked, form: Literal["csv", "json"] = "csv") -> Response:
    kind, lines = ("text/csv", _csv(db, asked)) if form == "csv" else ("application/json", _json(db, asked))
    headers = {"Content-Disposition": f'attachment; filename="holdfast-audit.{form}"'}
    return StreamingResponse(lines, media_type=f"{kind}; charset=utf-8", headers=headers)


def _pages(db: Database, asked: AuditQuery) -> Iterator[list[AuditEntry]]:
    """Read in pages, each in its own transaction, so that a long log holds no memory and no snapshot."""
    while True:
        with db.read() as session:
            page = audit.entries(session, asked, limit=EXPORTED_AT_ONCE)
        if not page:
            return
        yield page
        asked = replace(asked, older_than=page[-1].id)


def _csv(db: Database, asked: AuditQuery) -> Iterator[bytes]:
    yield csv_bytes([COLUMNS], LINE_END)
    for page in _pages(db, asked):
        yield csv_bytes(([_cell(entry, column) for column in COLUMNS] for entry in page), LINE_END)


def _cell(entry: AuditEntry, column: str) -> object:
    return iso(entry.at) if column == "at" else csv_cell(getattr(entry, column))


def _json(db: Database, asked: AuditQuery) -> Iterator[bytes]:
    between = b"["
    for page in _pages(db, asked):
        for entry in page:
            yield between + msgspec.json.encode(entry)
            between = b",\n"
    yield (b"[" if between == b"[" else b"") + b"]\n"
