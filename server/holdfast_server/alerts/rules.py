"""What a project wants to be told of: built-in rules, as they are or as somebody changed them, and its own."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

from msgspec import UNSET, Struct, UnsetType
from sqlalchemy import delete, select
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast.protocol.administration import AlertRule
from holdfast_server import models
from holdfast_server.alerts.conditions import KINDS, SEVERITIES, Kind
from holdfast_server.alerts.errors import UnknownRule
from holdfast_server.core.errors import InvalidSetting, UnknownProject
from holdfast_server.db import Database
from holdfast_server.records import audit

MAX_LIMIT = 1e12
MAX_FOR_SECONDS = 7 * 86400.0
MAX_PATTERN = 200
MAX_RULES = 100
"""Own ones in a project: each is looked at for each of its jobs, every few seconds."""
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")


class RuleChanges(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What to change of a rule; a name that is not known yet becomes a rule of the project's own."""

    kind: str | UnsetType = UNSET
    """Of a new rule; that of one that exists stays."""
    enabled: bool | UnsetType = UNSET
    severity: str | UnsetType = UNSET
    limit: float | UnsetType = UNSET
    for_seconds: float | UnsetType = UNSET
    jobs: str | UnsetType = UNSET


def applies(rule: AlertRule, job: str) -> bool:
    return rule.enabled and fnmatchcase(job, rule.jobs)


async def rules_of(session: AsyncSession, project: str) -> list[AlertRule]:
    """Built-in ones first, then the project's own by name."""
    rows = models.AlertRuleRecord
    changed = {row.name: row for row in await session.scalars(select(rows).where(rows.project == project))}
    built_in = [_rule(project, kind, changed.pop(kind.name, None)) for kind in KINDS.values() if kind.built_in]
    # A rule of a kind that another version of the server knows waits for that version.
    own = [_rule(project, KINDS[row.kind], row) for _, row in sorted(changed.items()) if row.kind in KINDS]
    return built_in + own


async def listed(db: Database, project: str) -> list[AlertRule]:
    """Raises UnknownProject."""
    async with db.read() as session:
        if await session.get(models.ProjectRecord, project) is None:
            raise UnknownProject(project)
        return await rules_of(session, project)


async def change(
    db: Database, project: str, name: str, changes: RuleChanges, *, who: str, request_id: str, now: float
) -> AlertRule:
    """Raises UnknownProject, and InvalidSetting, naming the field."""

    async def work(session: AsyncSession) -> AlertRule:
        if await session.get(models.ProjectRecord, project) is None:
            raise UnknownProject(project)
        known = {rule.name: rule for rule in await rules_of(session, project)}
        before = known.get(name)
        kind = KINDS[before.kind] if before else _kind_of_new(name, changes, known)
        row = await session.get(models.AlertRuleRecord, (project, name))
        if row is None:
            row = _row(before or _rule(project, kind, None, name=name))
            session.add(row)
        _set(row, kind, changes)
        row.changed_at, row.changed_by = now, who
        await session.flush()
        after = _rule(project, kind, row)
        await _noted(session, "alert.rule.change", before, after, who=who, request_id=request_id, now=now)
        return after

    return await db.write(work)


async def remove(db: Database, project: str, name: str, *, who: str, request_id: str, now: float) -> None:
    """A rule of its own is gone; a built-in one is as it came. Raises UnknownRule."""

    async def work(session: AsyncSession) -> None:
        rows = models.AlertRuleRecord
        row = await session.get(rows, (project, name))
        built_in = name in KINDS and KINDS[name].built_in
        if row is None and built_in:
            return
        if row is None:
            raise UnknownRule(project, name)
        before = _rule(project, KINDS[row.kind], row)
        await session.execute(delete(rows).where(rows.project == project, rows.name == name))
        after = _rule(project, KINDS[name], None) if built_in else None
        await _noted(session, "alert.rule.remove", before, after, who=who, request_id=request_id, now=now)

    await db.write(work)


def _rule(project: str, kind: Kind, row: models.AlertRuleRecord | None, *, name: str | None = None) -> AlertRule:
    return AlertRule(
        project=project,
        name=row.name if row else name or kind.name,
        kind=kind.name,
        title=kind.title,
        meaning=kind.meaning,
        unit=kind.unit,
        built_in=kind.built_in and (row.name if row else name or kind.name) == kind.name,
        enabled=row.enabled if row else True,
        severity=row.severity if row else kind.severity,  # type: ignore[arg-type]
        limit=row.limit_value if row else kind.limit,
        for_seconds=row.for_seconds if row else kind.for_seconds,
        jobs=row.jobs if row else "*",
        changed_at=row.changed_at if row else None,
        changed_by=row.changed_by if row else None,
    )


def _row(rule: AlertRule) -> models.AlertRuleRecord:
    return models.AlertRuleRecord(
        project=rule.project,
        name=rule.name,
        kind=rule.kind,
        enabled=rule.enabled,
        severity=rule.severity,
        limit_value=rule.limit,
        for_seconds=rule.for_seconds,
        jobs=rule.jobs,
    )


def _kind_of_new(name: str, changes: RuleChanges, known: dict[str, AlertRule]) -> Kind:
    if not _NAME.fullmatch(name):
        reason = "a rule's name has 1 to 64 small letters, digits, '_' or '-', as in long-runs"
        raise InvalidSetting("name", reason)
    if sum(not rule.built_in for rule in known.values()) >= MAX_RULES:
        raise InvalidSetting("name", f"a project has at most {MAX_RULES} rules of its own: remove one")
    if changes.kind is UNSET or changes.kind not in KINDS or name in KINDS:
        kinds = ", ".join(KINDS)
        raise InvalidSetting("kind", f"a new rule has a name of its own and one of these kinds: {kinds}")
    return KINDS[changes.kind]


def _set(row: models.AlertRuleRecord, kind: Kind, changes: RuleChanges) -> None:
    if changes.kind not in (UNSET, kind.name):
        raise InvalidSetting("kind", f"this rule is of kind {kind.name}: make another one for {changes.kind!r}")
    if changes.enabled is not UNSET:
        row.enabled = changes.enabled
    if changes.severity is not UNSET:
        if changes.severity not in SEVERITIES:
            raise InvalidSetting("severity", f"severity {changes.severity!r} is none of {', '.join(SEVERITIES)}")
        row.severity = changes.severity
    if changes.limit is not UNSET:
        if not 0 <= changes.limit <= MAX_LIMIT:
            raise InvalidSetting("limit", f"limit {changes.limit:g} is outside 0 to {MAX_LIMIT:g}")
        row.limit_value = changes.limit
    if changes.for_seconds is not UNSET:
        if not 0 <= changes.for_seconds <= MAX_FOR_SECONDS:
            raise InvalidSetting("for_seconds", f"for_seconds {changes.for_seconds:g} is outside 0 to 7 days")
        row.for_seconds = changes.for_seconds
    if changes.jobs is not UNSET:
        if not 1 <= len(changes.jobs) <= MAX_PATTERN or not re.fullmatch(r"[A-Za-z0-9._*?-]+", changes.jobs):
            reason = "name jobs by their letters, with * and ? for parts of them, as in llama-*"
            raise InvalidSetting("jobs", reason)
        row.jobs = changes.jobs


async def _noted(
    session: AsyncSession,
    action: str,
    before: AlertRule | None,
    after: AlertRule | None,
    *,
    who: str,
    request_id: str,
    now: float,
) -> None:
    rule = after or before
    assert rule is not None
    await audit.record(
        session,
        who=who,
        action=action,
        project=rule.project,
        before=_told(before),
        after=_told(after),
        request_id=request_id,
        now=now,
    )


def _told(rule: AlertRule | None) -> dict[str, object] | None:
    if rule is None:
        return None
    told = ("name", "kind", "enabled", "severity", "limit", "for_seconds", "jobs")
    return {name: getattr(rule, name) for name in told}
