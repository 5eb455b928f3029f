"""The audit log: who changed what, written in the transaction that changed it, each row sealing the one before."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import msgspec
from sqlalchemy import insert, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast.protocol.administration import AuditEntry
from holdfast_server import models

Facts = Mapping[str, object]

KINDS = ("settings", "restore", "checkpoint", "job", "alert", "retention", "key", "person", "project", "server")
"""What is written down is about one of these: the first word of an action."""
PAGE_ROWS = 1000
"""Read at once when the whole chain is gone through."""


async def record(
    session: AsyncSession,
    *,
    who: str,
    action: str,
    now: float,
    job: str | None = None,
    project: str | None = None,
    before: Facts | None = None,
    after: Facts | None = None,
    request_id: str = "",
) -> None:
    """Add a row in the caller's transaction: what it tells of is stored with it, or neither is.

    Args:
        session: the transaction. It holds the end of the chain until it ends, so record last.
        who: the name of the one who asked.
        action: what was done, as `thing.verb`: `settings.edit`, `token.create`, `alert.silence`.
        now: seconds since the epoch.
        job: the job that it is about.
        project: the project that it is about; that of the job where only a job is given.
        before: what it was, by name. Never a secret.
        after: what it has become, by name. Never a secret.
        request_id: of the request in which it was asked for; empty: of the one that handed the work in.
    """
    if project is None and job is not None:
        project = await session.scalar(select(models.JobRecord.project).where(models.JobRecord.name == job))
    head = models.AuditHeadRecord
    number, digest = (await session.execute(select(head.id, head.digest).with_for_update())).one()
    row = _Row(
        id=number + 1,
        at=float(now),
        who=who,
        action=action,
        job=job,
        project=project,
        before=_text(before),
        after=_text(after),
        request_id=request_id or session.info.get("request_id", ""),
    )
    sealed = _seal(digest, row)
    await session.execute(insert(models.AuditEntryRecord).values(**msgspec.structs.asdict(row), digest=sealed))
    await session.execute(update(head).values(id=row.id, digest=sealed))


class _Row(msgspec.Struct, frozen=True, kw_only=True):
    """What a digest covers, in the order in which it covers it: a change of either breaks every chain there is."""

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
class Question:
    """Which rows; what is empty asks for any."""

    who: str = ""
    action: str = ""
    """Or the first part of one: `key` finds `key.create` and `key.revoke`."""
    job: str = ""
    project: str = ""
    older_than: int | None = None
    """A row: only those before it."""
    visible_projects: Collection[str] | None = None
    """Only what is about these; None: everything."""


async def entries(session: AsyncSession, question: Question, *, limit: int) -> list[AuditEntry]:
    """The newest first."""
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
    return [
        AuditEntry(**{name: getattr(row, name) for name in _Row.__struct_fields__}, digest=row.digest.hex())
        for row in await session.scalars(query)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What going through the whole chain found."""

    rows: int
    """How many fit, from the first on."""
    head: str
    """The digest of the last that fits, in hexadecimal: note it elsewhere, and compare."""
    broken: int | None = None
    """The first row that does not fit, or that is missing."""
    reason: str = ""


async def verify(session: AsyncSession, *, known: tuple[int, bytes] | None = None) -> Verdict:
    """Go through the chain from its beginning to where it says that it ends.

    Args:
        session: the database.
        known: a row and its digest, noted elsewhere at an earlier time: a chain that was written anew lacks them.
    """
    entry, head = models.AuditEntryRecord, models.AuditHeadRecord
    rows, digest = 0, b""
    while True:
        query = select(entry).where(entry.id > rows).order_by(entry.id).limit(PAGE_ROWS)
        page = (await session.scalars(query)).all()
        for found in page:
            if found.id != rows + 1:
                return _broken(rows, digest, "it is missing")
            row = _Row(**{name: getattr(found, name) for name in _Row.__struct_fields__})
            if _seal(digest, row) != found.digest:
                return _broken(rows, digest, "it, or the row before it, is not what was written")
            if known is not None and found.id == known[0] and found.digest != known[1]:
                return _broken(rows, digest, "it had another digest when that was noted: the log was written anew")
            rows, digest = found.id, found.digest
        session.expunge_all()
        if len(page) < PAGE_ROWS:
            break
    end = (await session.execute(select(head.id, head.digest))).one_or_none()
    if end is None or tuple(end) != (rows, digest):
        return _broken(rows, digest, "the log goes on after the last row that is there")
    if known is not None and known[0] > rows:
        return _broken(rows, digest, f"row {known[0]} was there when its digest was noted")
    return Verdict(rows=rows, head=digest.hex())


def _broken(rows: int, digest: bytes, reason: str) -> Verdict:
    return Verdict(rows=rows, head=digest.hex(), broken=rows + 1, reason=reason)
