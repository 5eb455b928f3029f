"""The background job that evaluates every rule for every job."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from sqlalchemy.orm import Session

from holdfast.protocol.administration import AlertRule
from holdfast_server import models
from holdfast_server.alerts import deliveries, facts, groups, incidents, messages, rules
from holdfast_server.alerts.conditions import KINDS, RuleResult
from holdfast_server.alerts.facts import JobFacts
from holdfast_server.alerts.loss_spikes import OpenSpike
from holdfast_server.db import Database, lock_job
from holdfast_server.records import last_good

EVERY_SECONDS = 10.0
AT_REST_EVERY_SECONDS = 120.0
"""For jobs that have ended, most of a fleet after some months: only a request that expires, or a checkpoint that
is found damaged, can still concern one."""
ANALYZED_EVERY_SECONDS = 60.0
"""For rules about an analysis of the last minutes, which reads more."""
JOBS_AT_ONCE = 500
"""Jobs per read transaction, so that none takes long."""
LOSSES_AT_ONCE = 10
"""Jobs whose losses are in memory at once: with their chunks, those of a fleet would take hundreds of MB."""
WRITES_AT_ONCE = 8
"""They share a commit if a thousand jobs fall silent at once, and do not delay the storage of reports."""
RULE_DISABLED = "the rule was disabled, or no longer applies to this job"
REPLACED = "a newer one followed"

_OpenAlerts = dict[str, dict[str, models.AlertRecord]]
"""By job and rule."""


@dataclass(frozen=True, slots=True)
class _RuleCheck:
    rule: AlertRule
    result: RuleResult | None


def evaluate(db: Database, now: float, *, at_rest: bool = False, analyzed: bool = False) -> None:
    """Begin, update and resolve alerts and queue their messages, in one transaction per job.

    With `at_rest`, only for jobs that have ended and have no open alert; otherwise for all others. With
    `analyzed`, for the rules about an analysis of the last minutes; otherwise for all other rules.
    """
    with db.read() as session:
        names = facts.candidates(session, at_rest=at_rest, now=now)
    for start in range(0, len(names), JOBS_AT_ONCE):
        part = names[start : start + JOBS_AT_ONCE]
        with db.read() as session:
            known = facts.gather(session, part, now=now)
            if analyzed:
                known = facts.analyze(session, known, now=now)
            by_project = {
                project: _rules_of(session, project, analyzed=analyzed)
                for project in {job.project for job in known}
            }
            open_alerts, outdated = _open_alerts(session, part, analyzed=analyzed)
            rows = [row for alerts in open_alerts.values() for row in alerts.values()]
            open_spikes = facts.read_open_spikes(session, [row for row in rows if _has_window(row)])
            spike_rules = {
                name: [rule for rule in found if KINDS[rule.kind].window] for name, found in by_project.items()
            }
        due = []
        for job in _with_losses(db, known, spike_rules):
            found = open_alerts.get(job.job, {})
            checks = _check(job, by_project[job.project], open_spikes)
            stepping = any(True for _ in _steps(found, checks, now=now))
            if stepping or job.job in outdated or _without_rule(found, checks):
                due.append((job.job, partial(_update, job=job.job, checks=checks, analyzed=analyzed, now=now)))
        for begin in range(0, len(due), WRITES_AT_ONCE):
            some = due[begin : begin + WRITES_AT_ONCE]
            for stored in [db.submit(update, job=name) for name, update in some]:
                stored.result()


def _with_losses(
    db: Database, known: list[JobFacts], spike_rules: dict[str, list[AlertRule]]
) -> Iterator[JobFacts]:
    """Yield the jobs, those that a rule over a window applies to with their losses."""
    for start in range(0, len(known), LOSSES_AT_ONCE):
        some = known[start : start + LOSSES_AT_ONCE]
        asked = [job for job in some if any(rules.applies(each, job.job) for each in spike_rules[job.project])]
        with db.read() as session:
            losses = facts.read_losses(session, asked)
        for job in some:
            yield replace(job, losses=losses[job.job]) if job.job in losses else job


def _open_rows(session: Session, jobs: list[str], *, analyzed: bool) -> dict[tuple[str, str], models.AlertRecord]:
    """Return the open alerts by job and rule, of the rules that are evaluated."""
    found = incidents.open_rows(session, jobs)
    return {key: row for key, row in found.items() if _is_analyzed(row) == analyzed}


def _rules_of(session: Session, project: str, *, analyzed: bool) -> list[AlertRule]:
    return [rule for rule in rules.rules_of(session, project) if KINDS[rule.kind].analyzed == analyzed]


def _is_analyzed(row: models.AlertRecord) -> bool:
    return row.kind in KINDS and KINDS[row.kind].analyzed


def _open_alerts(session: Session, jobs: list[str], *, analyzed: bool) -> tuple[_OpenAlerts, set[str]]:
    """Return the open alerts by job and rule, without those that a restore ends, and the jobs to update."""
    found: _OpenAlerts = {}
    for (job, rule), row in _open_rows(session, jobs, analyzed=analyzed).items():
        found.setdefault(job, {})[rule] = row
    outdated = set()
    for job, alerts in found.items():
        offering = _about_iterations(alerts)
        if offering and last_good.is_outdated(session, job, offering):
            outdated.add(job)
        for row, _ in last_good.abandoned(session, job, offering) if offering else ():
            del alerts[row.rule]
            outdated.add(job)
    return found, outdated


def _has_window(row: models.AlertRecord) -> bool:
    return row.kind in KINDS and KINDS[row.kind].window > 0


def _check(
    job: JobFacts, project_rules: list[AlertRule], open_spikes: dict[tuple[str, str], OpenSpike]
) -> list[_RuleCheck]:
    applying = (rule for rule in project_rules if rules.applies(rule, job.job))
    found = []
    judged: dict[tuple[str, float, int], RuleResult | None] = {}
    for rule in applying:
        spike = open_spikes.get((job.job, rule.name))
        condition = (rule.kind, rule.limit, rule.window)
        if spike is not None or condition not in judged:
            # the facts are copied for rules with a window only: a copy takes longer than most checks
            facts_of_rule = replace(job, window=rule.window, open_spike=spike) if rule.window else job
            result = KINDS[rule.kind].judge(facts_of_rule, rule.limit)
            if spike is None:
                judged[condition] = result
        else:
            result = judged[condition]
        found.append(_RuleCheck(rule, result))
    return found


def _steps(
    rows: dict[str, models.AlertRecord], checks: list[_RuleCheck], *, now: float
) -> Iterator[tuple[models.AlertRecord | None, _RuleCheck, incidents.Step]]:
    for check in checks:
        row = rows.get(check.rule.name)
        step = incidents.next_step(row, check.rule, check.result, now=now)
        if step is not None:
            yield row, check, step


def _about_iterations(rows: dict[str, models.AlertRecord]) -> list[models.AlertRecord]:
    return [row for row in rows.values() if row.iteration is not None]


def _without_rule(rows: dict[str, models.AlertRecord], checks: list[_RuleCheck]) -> list[models.AlertRecord]:
    names = {check.rule.name for check in checks}
    return [row for rule, row in rows.items() if rule not in names]


def _update(session: Session, *, job: str, checks: list[_RuleCheck], analyzed: bool, now: float) -> None:
    """Decide again under the job's lock: a person or another instance may have changed an alert since the read."""
    lock_job(session, job)
    found = _open_rows(session, [job], analyzed=analyzed)
    rows = {rule: row for (_, rule), row in found.items()}
    offering = _about_iterations(rows)
    if offering:
        for row, iteration in last_good.abandoned(session, job, offering):
            _end(session, rows.pop(row.rule), f"restored to iteration {iteration:,}", now=now)
        last_good.keep(session, job, now=now)
    for row in _without_rule(rows, checks):
        _end(session, row, RULE_DISABLED, now=now)
    for open_row, check, step in list(_steps(rows, checks, now=now)):
        if open_row is None:
            _begin(session, job, check, now=now)
        else:
            _take(session, open_row, check, step, now=now)
        session.flush()
    if offering:
        last_good.keep(session, job, now=now)


def _begin(session: Session, job: str, check: _RuleCheck, *, now: float) -> None:
    assert check.result is not None
    row = incidents.begin(job, check.rule, check.result, now=now)
    session.add(row)
    if row.iteration is not None:
        session.flush()
        last_good.keep(session, job, now=now)
    if check.rule.for_seconds <= 0:
        _fire(session, row, check, now=now)


def _take(
    session: Session, row: models.AlertRecord, check: _RuleCheck, step: incidents.Step, *, now: float
) -> None:
    match step:
        case "replace":
            _end(session, row, REPLACED, now=now)
            _begin(session, row.job, check, now=now)
        case "fire":
            _fire(session, row, check, now=now)
        case "discard":
            session.delete(row)
        case "keep_firing":
            row.clear_since = None
        case "start_clearing":
            row.clear_since = now
        case "update":
            assert check.result is not None
            was_announced = incidents.is_announced(row)
            incidents.update(row, check.rule, check.result, now=now)
            if check.result.is_announced and not was_announced and row.acknowledged_at is None:
                _send(session, row, "firing", now=now)
        case "end_silence":
            row.silenced_until = row.silenced_by = None
            if row.acknowledged_at is None:
                _send(session, row, "firing", now=now)
        case "resolve":
            assert check.result is not None
            _end(session, row, check.result.end, now=now)


def _fire(session: Session, row: models.AlertRecord, check: _RuleCheck, *, now: float) -> None:
    assert check.result is not None
    incidents.fire(session, row, check.rule, check.result, now=now)
    session.flush()
    groups.join(session, row, now=now)
    _send(session, row, "firing", now=now)


def _end(session: Session, row: models.AlertRecord, why: str, *, now: float) -> None:
    if row.fired_at is None:
        session.delete(row)
    else:
        row.resolved_at, row.resolved_why = now, why
        _send(session, row, "resolved", now=now)
    session.flush()


def _send(session: Session, row: models.AlertRecord, event: messages.Event, *, now: float) -> None:
    # a service that keeps incidents hears of the end of a silenced alert as well
    if incidents.is_announced(row) and (event == "resolved" or not incidents.is_silenced(row, now=now)):
        deliveries.enqueue(session, row, event, now=now)
