"""Audit log: each change and its author, written in the transaction of the change, in a hash chain."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import msgspec
from sqlalchemy import insert, or_, select, update
from sqlalchemy.orm import Session

from holdfast.protocol.administration import AuditEntry
from holdfast_server import models
from holdfast_server.core.encoding import answer_from
from holdfast_server.db import Database

Facts = Mapping[str, object]
ANCHOR_SECONDS = 3600.0
"""Time between two log lines with the end of the chain."""

KINDS = (
    "settings", "restore", "training", "value", "checkpoint", "annotation", "job", "alert", "retention", "key",
    "person", "project", "server", "approval", "store",
)  # fmt: skip
"""First words of actions: what a change is about."""
PAGE_ROWS = 1000
"""Rows read at once to verify the chain."""

logger = logging.getLogger(__name__)


def record(
    session: Session,
    *,
    who: str,
    action: str,
    now: float,
    job: str | None = None,
    project: str | None = None,
    before: Facts | None = None,
    after: Facts | None = None,
) -> None:
    """Add a row in the caller's transaction, so that both the change and its record are stored, or neither.

    Args:
        session: the transaction, which locks the end of the chain until it ends: record last.
        action: what was done, as `thing.verb`: `settings.edit`, `token.create`, `alert.silence`.
        project: project of the change; by default the project of the job.
        before: previous values by name. Never a secret.
        after: new values by name. Never a secret.
    """
    if project is None and job is not None:
        project = session.scalar(select(models.JobRecord.project).where(models.JobRecord.name == job))
    head = models.AuditHeadRecord
    number, digest = session.execute(select(head.id, head.digest).with_for_update()).one()
    row = _Row(
        id=number + 1,
        at=float(now),
        who=who,
        action=action,
        job=job,
        project=project,
        before=_text(before),
        after=_text(after),
        request_id=session.info.get("request_id", ""),  # of the request that submitted the transaction
    )
    sealed = _seal(digest, row)
    session.execute(insert(models.AuditEntryRecord).values(**msgspec.structs.asdict(row), digest=sealed))
    session.execute(update(head).values(id=row.id, digest=sealed))


class _Row(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that a digest covers, in order: changing them invalidates every existing chain."""

    id: int
    at: float
    who: str
    action: str
    job: str | None
    project: str | None
    before: str | None
    after: str | None
    request_id: str


def _text(facts: Facts | None) -> str | None:
    return None if facts is None else msgspec.json.encode(facts, order="sorted").decode()


def _seal(before: bytes, row: _Row) -> bytes:
    return hashlib.sha256(before + msgspec.msgpack.encode(msgspec.structs.astuple(row))).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditQuery:
    """Filter for entries; empty fields match all."""

    who: str = ""
    action: str = ""
    """An action, or its first word: `key` matches `key.create` and `key.revoke`."""
    job: str = ""
    project: str = ""
    older_than: int | None = None
    """Id of an entry: only earlier ones."""
    visible_projects: Collection[str] | None = None
    """Projects that the user may see; `None`: all."""


def entries(session: Session, question: AuditQuery, *, limit: int) -> list[AuditEntry]:
    """Return the matching entries, newest first."""
    rows = models.AuditEntryRecord
    query = select(rows).order_by(rows.id.desc()).limit(limit)
    if question.who:
        query = query.where(rows.who == question.who)
    if question.action:
        first_word = rows.action.startswith(f"{question.action}.", autoescape=True)
        query = query.where(or_(rows.action == question.action, first_word))
    if question.job:
        query = query.where(rows.job == question.job)
    if question.project:
        query = query.where(rows.project == question.project)
    if question.older_than is not None:
        query = query.where(rows.id < question.older_than)
    if question.visible_projects is not None:
        query = query.where(rows.project.in_(question.visible_projects))
    return [answer_from(row, AuditEntry, digest=row.digest.hex()) for row in session.scalars(query)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainCheck:
    """Result of verifying the chain."""

    rows: int
    """Number of valid rows, from the first on."""
    head: str
    """Digest of the last valid row in hexadecimal, to be noted elsewhere and compared later."""
    broken: int | None = None
    """First row that is invalid or missing."""
    reason: str = ""


def verify(session: Session, *, known: tuple[int, bytes] | None = None) -> ChainCheck:
    """Verify the chain from its beginning to its recorded end.

    Args:
        known: an earlier row and its digest, noted elsewhere, to detect a rewritten chain.
    """
    entry, head = models.AuditEntryRecord, models.AuditHeadRecord
    rows, digest = 0, b""
    while True:
        query = select(entry).where(entry.id > rows).order_by(entry.id).limit(PAGE_ROWS)
        page = session.scalars(query).all()
        for found in page:
            if found.id != rows + 1:
                return _broken(rows, digest, "it is missing")
            if _seal(digest, answer_from(found, _Row)) != found.digest:
                return _broken(rows, digest, "it or the row before it was changed")
            if known is not None and found.id == known[0] and found.digest != known[1]:
                return _broken(rows, digest, "its digest differs from the recorded one: the log was rewritten")
            rows, digest = found.id, found.digest
        session.expunge_all()
        if len(page) < PAGE_ROWS:
            break
    end = session.execute(select(head.id, head.digest)).one_or_none()
    if end is None or tuple(end) != (rows, digest):
        return _broken(rows, digest, "later rows are missing")
    if known is not None and known[0] > rows:
        return _broken(rows, digest, f"row {known[0]}, whose digest was recorded, is missing")
    return ChainCheck(rows=rows, head=digest.hex())


def log_head(db: Database, _: float) -> None:
    """Log the newest row's digest: an audit log that was rewritten in the database no longer contains it."""
    head = models.AuditHeadRecord
    with db.read() as session:
        row, digest = session.execute(select(head.id, head.digest)).one()
    if row:
        logger.info("the audit log is at %d:%s", row, digest.hex())


def _broken(rows: int, digest: bytes, reason: str) -> ChainCheck:
    return ChainCheck(rows=rows, head=digest.hex(), broken=rows + 1, reason=reason)
