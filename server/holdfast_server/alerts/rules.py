"""The alert rules of projects: built-in ones, possibly changed, and custom ones."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase
from urllib.parse import urlsplit

from msgspec import UNSET, Struct, UnsetType, structs
from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from holdfast.protocol.administration import AlertRule
from holdfast_server import models
from holdfast_server.accounts.projects import require_project
from holdfast_server.alerts.conditions import KINDS, SEVERITIES, RuleKind
from holdfast_server.core.encoding import answer_from
from holdfast_server.core.errors import InvalidSetting, UnknownRule
from holdfast_server.db import Database, transaction
from holdfast_server.records import audit

MAX_LIMIT = 1e12
MAX_FOR_SECONDS = 7 * 86400.0
MAX_PATTERN = 200
MIN_WINDOW, MAX_WINDOW = 20, 1000
MAX_RULES = 100
"""Custom rules of a project: each is evaluated for each of its jobs, every few seconds."""
MAX_WINDOW_CONDITIONS = 5
"""Pairs of limit and window of a project's rules: each is evaluated over thousands of losses of each job."""
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
MAX_RUNBOOK = 1000
COUNTED_SECONDS = 7 * 86400.0
"""Time in which the alerts of a rule are counted, to find one that is too loud."""
_STORED = ("kind", "enabled", "severity", "window", "for_seconds", "jobs", "runbook", "changed_at", "changed_by")
"""Fields that a row has under the same name."""
_AUDITED = ("name", "kind", "enabled", "severity", "limit", "window", "for_seconds", "jobs", "runbook")


class RuleChanges(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Changes of a rule. An unknown name creates a custom rule."""

    kind: str | UnsetType = UNSET
    """Kind of a new rule; the kind of an existing rule cannot change."""
    enabled: bool | UnsetType = UNSET
    severity: str | UnsetType = UNSET
    limit: float | UnsetType = UNSET
    window: int | UnsetType = UNSET
    for_seconds: float | UnsetType = UNSET
    jobs: str | UnsetType = UNSET
    runbook: str | UnsetType = UNSET
    """URL of what to do about its alerts; empty for none."""


def applies(rule: AlertRule, job: str) -> bool:
    return rule.enabled and fnmatchcase(job, rule.jobs)


def rules_of(session: Session, project: str) -> list[AlertRule]:
    """Return the built-in rules, then the custom ones by name."""
    rows = models.AlertRuleRecord
    stored = {row.name: row for row in session.scalars(select(rows).where(rows.project == project))}
    built_in = [
        _stored(stored.pop(kind.name)) if kind.name in stored else _default(project, kind, kind.name)
        for kind in KINDS.values()
        if kind.built_in
    ]
    # A kind may be unknown: a newer version of the server may have stored the rule.
    return built_in + [_stored(row) for _, row in sorted(stored.items()) if row.kind in KINDS]


def list_rules(db: Database, project: str, *, now: float | None = None) -> list[AlertRule]:
    """Return the rules of a project, with how often each fired in the last 7 days. Raises UnknownProject.

    Without `now`, they are not counted.
    """
    rows = models.AlertRecord
    with db.read() as session:
        require_project(session, project)
        found = rules_of(session, project)
        if now is None:
            return found
        query = select(rows.rule, func.count()).where(
            rows.project == project, rows.fired_at > now - COUNTED_SECONDS
        )
        fired = {rule: count for rule, count in session.execute(query.group_by(rows.rule))}  # noqa: C416 - rows
    return [structs.replace(rule, fired_7d=fired.get(rule.name, 0)) for rule in found]


def titles(db: Database, projects: Collection[str]) -> dict[str, str]:
    """Return the titles of all rules of some projects by name; custom rules have their name as title."""
    rows = models.AlertRuleRecord
    with db.read() as session:
        names = list(session.scalars(select(rows.name).where(rows.project.in_(projects)).distinct()))
    return {kind.name: kind.title for kind in KINDS.values() if kind.built_in} | {
        name: name for name in sorted(names) if name not in KINDS
    }


@transaction
def change(session: Session, project: str, name: str, changes: RuleChanges, *, who: str, now: float) -> AlertRule:
    """Change or create a rule. Raises UnknownProject, and InvalidSetting, which names the field."""
    require_project(session, project)
    known = {rule.name: rule for rule in rules_of(session, project)}
    before = known.get(name)
    rule = before or _default(project, _kind_of_new(name, changes, known), name)
    row = session.get(models.AlertRuleRecord, (project, name))
    if row is None:
        row = models.AlertRuleRecord(project=project, name=name, limit_value=rule.limit)
        for field in _STORED:
            setattr(row, field, getattr(rule, field))
        session.add(row)
    _apply(row, changes)
    _limit_conditions(row, known.values())
    row.changed_at, row.changed_by = now, who
    session.flush()
    after = _stored(row)
    _record(session, "alert.rule.change", before, after, who=who, now=now)
    return after


@transaction
def remove(session: Session, project: str, name: str, *, who: str, now: float) -> None:
    """Remove a custom rule, or reset a built-in one to its default. Raises UnknownRule."""
    rows = models.AlertRuleRecord
    row = session.get(rows, (project, name))
    default = _default(project, KINDS[name], name) if name in KINDS and KINDS[name].built_in else None
    if row is None and default is None:
        raise UnknownRule(project, name)
    if row is not None:
        before = _stored(row)
        session.execute(delete(rows).where(rows.project == project, rows.name == name))
        _record(session, "alert.rule.remove", before, default, who=who, now=now)


def _default(project: str, kind: RuleKind, name: str) -> AlertRule:
    built_in = kind.built_in and name == kind.name
    return answer_from(
        kind, AlertRule, project=project, name=name, kind=kind.name, built_in=built_in, enabled=True, jobs="*",
        runbook="", changed_at=None, changed_by=None, fired_7d=0,
    )  # fmt: skip


def _stored(row: models.AlertRuleRecord) -> AlertRule:
    fields = {field: getattr(row, field) for field in _STORED}
    return structs.replace(_default(row.project, KINDS[row.kind], row.name), limit=row.limit_value, **fields)


def _kind_of_new(name: str, changes: RuleChanges, known: dict[str, AlertRule]) -> RuleKind:
    if not _NAME.fullmatch(name):
        reason = "use 1 to 64 lower-case letters, digits, '_' and '-' for the name, as in long-runs"
        raise InvalidSetting("name", reason)
    if sum(not rule.built_in for rule in known.values()) >= MAX_RULES:
        raise InvalidSetting("name", f"a project has at most {MAX_RULES} custom rules: remove one first")
    if changes.kind is UNSET or changes.kind not in KINDS or name in KINDS:
        kinds = ", ".join(KINDS)
        raise InvalidSetting(
            "kind", f"a new rule needs a name that is not a kind, and one of these kinds: {kinds}"
        )
    return KINDS[changes.kind]


def _apply(row: models.AlertRuleRecord, changes: RuleChanges) -> None:
    if changes.kind not in (UNSET, row.kind):
        raise InvalidSetting("kind", f"this rule is of kind {row.kind}: create another one for {changes.kind!r}")
    if changes.enabled is not UNSET:
        row.enabled = changes.enabled
    if changes.severity is not UNSET:
        if changes.severity not in SEVERITIES:
            raise InvalidSetting(
                "severity", f"severity {changes.severity!r} is not one of {', '.join(SEVERITIES)}"
            )
        row.severity = changes.severity
    if changes.limit is not UNSET:
        if not 0 <= changes.limit <= MAX_LIMIT:
            raise InvalidSetting("limit", f"limit {changes.limit:g} is outside 0 to {MAX_LIMIT:g}")
        row.limit_value = changes.limit
    if changes.window is not UNSET:
        if not KINDS[row.kind].window:
            raise InvalidSetting("window", f"a rule of kind {row.kind} has no window")
        if not MIN_WINDOW <= changes.window <= MAX_WINDOW:
            raise InvalidSetting("window", f"window {changes.window} is outside {MIN_WINDOW} to {MAX_WINDOW:,}")
        row.window = changes.window
    if changes.for_seconds is not UNSET:
        if not 0 <= changes.for_seconds <= MAX_FOR_SECONDS:
            raise InvalidSetting("for_seconds", f"for_seconds {changes.for_seconds:g} is outside 0 to 7 days")
        row.for_seconds = changes.for_seconds
    if changes.jobs is not UNSET:
        if not 1 <= len(changes.jobs) <= MAX_PATTERN or not re.fullmatch(r"[A-Za-z0-9._*?-]+", changes.jobs):
            raise InvalidSetting("jobs", "give a pattern for job names, with the wildcards * and ?, as in llama-*")
        row.jobs = changes.jobs
    if changes.runbook is not UNSET:
        row.runbook = _parse_runbook(changes.runbook)


def _parse_runbook(text: str) -> str:
    url = text.strip()
    if not url:
        return ""
    try:
        parts = urlsplit(url)
    except ValueError:
        parts = urlsplit("")
    # it is a link in pages and in messages
    is_plain = all(character.isprintable() and character not in ' <>|"' for character in url)
    if parts.scheme not in ("http", "https") or not parts.hostname or not is_plain or len(url) > MAX_RUNBOOK:
        raise InvalidSetting(
            "runbook", "give an http or https URL without spaces, as in https://wiki.example.org/gpu"
        )
    return url


def _limit_conditions(changed: models.AlertRuleRecord, known: Iterable[AlertRule]) -> None:
    conditions = {
        (rule.limit, rule.window) for rule in known if KINDS[rule.kind].window and rule.name != changed.name
    }
    is_new = changed.window and (changed.limit_value, changed.window) not in conditions
    if is_new and len(conditions) >= MAX_WINDOW_CONDITIONS:
        used = ", ".join(f"{limit:g} over {window}" for limit, window in sorted(conditions))
        raise InvalidSetting(
            "window",
            f"rules of a project have at most {MAX_WINDOW_CONDITIONS} pairs of limit and window: use {used}",
        )


def _record(
    session: Session, action: str, before: AlertRule | None, after: AlertRule | None, *, who: str, now: float
) -> None:
    def fields(rule: AlertRule | None) -> dict[str, object] | None:
        return None if rule is None else {name: getattr(rule, name) for name in _AUDITED}

    project = (after or before).project  # type: ignore[union-attr]  # one of them is given
    audit.record(
        session, who=who, action=action, project=project, before=fields(before), after=fields(after), now=now
    )
