"""One change of several jobs: which of them it applies to, and the outcome of each."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass

from msgspec import UNSET
from sqlalchemy import select

from holdfast.pacing import parse_budget
from holdfast.pacing.settings import parse_write_budget
from holdfast.protocol.administration import Alert
from holdfast.protocol.fleet import BulkChange, BulkOutcome, BulkResult
from holdfast.protocol.jobs import DesiredChanges, JobStatus
from holdfast_server import models
from holdfast_server.alerts import incidents
from holdfast_server.control import control
from holdfast_server.core.errors import (
    AlertResolved,
    InvalidSetting,
    PermissionDenied,
    RequestRefused,
    UnknownAlert,
    UnknownJob,
)
from holdfast_server.core.principal import Principal, Role
from holdfast_server.db import Database, DatabaseBusy, DatabaseUnavailable
from holdfast_server.queries.fleet import FleetQuery, matching_jobs
from holdfast_server.records.checkpoints import NAMED_AT_ONCE
from holdfast_server.records.job_status import ALIVE, ENDED, current_attempt, status_in_sql

MOST_JOBS = 2000
"""Most jobs that can be changed in one request."""
JOBS_AT_ONCE = 64
"""Jobs that are changed concurrently: they share commits, and leave the queue of writes to the agents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _JobState:
    """What decides whether a change applies to a job."""

    project: str
    status: JobStatus
    paused: bool
    budget: float | None
    write_bytes_per_second: float | None
    firing: list[Alert]


def change(db: Database, asked: BulkChange, *, asker: Principal, now: float) -> BulkResult:
    """Change all selected jobs that the change applies to, and return the outcome of each.

    Each job is changed, refused and audited on its own, as by a change of that job alone.

    Raises:
        InvalidSetting: the budget is not valid; or no job, or too many, are selected.
    """
    try:
        wanted = _wanted(asked)
    except ValueError as error:
        raise InvalidSetting(asked.action, str(error)) from None
    names = _selected(db, asked, asker, now=now)
    states = _states(db, names, with_alerts=asked.action == "acknowledge", now=now)

    def one(job: str) -> BulkOutcome:
        state = states.get(job)
        refusal = _refusal(job, state, asked, wanted, asker)
        if refusal or state is None or asked.preview:
            return BulkOutcome(job=job, refusal=refusal)
        return _apply(db, job, asked, state.firing, who=asker.name, now=now)

    with ThreadPoolExecutor(JOBS_AT_ONCE, "holdfast-bulk") as threads:
        outcomes = list(threads.map(lambda job: copy_context().run(one, job), names))
    return BulkResult(changed=sum(not each.refusal for each in outcomes), outcomes=outcomes)


def _selected(db: Database, asked: BulkChange, asker: Principal, *, now: float) -> list[str]:
    if (asked.jobs is UNSET) == (asked.filter is UNSET):
        raise InvalidSetting("jobs", "give either jobs or filter")
    names = list(dict.fromkeys(asked.jobs)) if asked.jobs is not UNSET else []
    if asked.filter is not UNSET:
        wanted = asked.filter
        question = FleetQuery(
            search=wanted.search, status=wanted.status, project=wanted.project, owner=wanted.owner,
            labels=tuple(wanted.labels), visible_projects=asker.visible_projects,
        )  # fmt: skip
        names = matching_jobs(db, question, now=now)
    if not 1 <= len(names) <= MOST_JOBS:
        raise InvalidSetting(
            "jobs", f"{len(names):,} jobs are selected: 1 to {MOST_JOBS:,} can be changed at once"
        )
    return names


def _states(db: Database, names: list[str], *, with_alerts: bool, now: float) -> dict[str, _JobState]:
    job, found = models.JobRecord, dict[str, _JobState]()
    query = select(
        job.name, job.project, job.paused, job.budget, job.write_bytes_per_second,
        status_in_sql(now=now).label("status"),
    )  # fmt: skip
    query = query.outerjoin(models.AttemptRecord, current_attempt())
    with db.read() as session:
        for first in range(0, len(names), NAMED_AT_ONCE):
            some = names[first : first + NAMED_AT_ONCE]
            alerts = incidents.open_of_jobs(session, some, now=now) if with_alerts else {}
            for row in session.execute(query.where(job.name.in_(some))):
                firing = [alert for alert in alerts.get(row.name, []) if alert.state == "firing"]
                found[row.name] = _JobState(
                    project=row.project, status=row.status, paused=row.paused, budget=row.budget,
                    write_bytes_per_second=row.write_bytes_per_second, firing=firing,
                )  # fmt: skip
    return found


def not_running(db: Database, names: Sequence[str], *, now: float) -> list[str]:
    """Return those of the jobs that have ended, in their order: a setting of theirs applies at the next start."""
    states = _states(db, list(names), with_alerts=False, now=now)
    return [name for name in names if name in states and states[name].status in ENDED]


def _wanted(asked: BulkChange) -> float | None:
    """Return the new budget or write budget; `None`: the script's own. ValueError: it is not valid."""
    if asked.action == "budget":
        return None if asked.budget is None else parse_budget(asked.budget)
    return None if asked.write_budget is None else parse_write_budget(asked.write_budget)


def _refusal(job: str, state: _JobState | None, asked: BulkChange, wanted: float | None, asker: Principal) -> str:
    """Return why a change does not apply to a job; empty if it does."""
    role = None if state is None else asker.role_in(state.project)
    if state is None or role is None:
        return str(UnknownJob(job))
    if role < Role.operator:
        return str(PermissionDenied(f"you may view {job}, but not change it"))
    match asked.action:
        case "checkpoint" if state.status not in ALIVE:
            return f"the job is {state.status}: no agent would take the checkpoint"
        case "pause" if state.paused:
            return "checkpoints are paused already"
        case "pause" if state.status == "finished":
            return "the job is finished"
        case "resume" if not state.paused:
            return "checkpoints are not paused"
        case "budget" if state.budget == wanted:
            return "it has this budget already"
        case "write_budget" if state.write_bytes_per_second == wanted:
            return "it has this write budget already"
        case "acknowledge" if not state.firing:
            return "no alert is firing"
        case _:
            return ""


def _apply(
    db: Database, job: str, asked: BulkChange, firing: Sequence[Alert], *, who: str, now: float
) -> BulkOutcome:
    try:
        if asked.action == "acknowledge":
            return BulkOutcome(job=job, alerts=_acknowledge(db, job, firing, who=who, now=now))
        made = control.edit(db, job, _changes(asked), version=None, who=who, now=now)
    except (RequestRefused, DatabaseBusy, DatabaseUnavailable) as refusal:
        return BulkOutcome(job=job, refusal=str(refusal))
    return BulkOutcome(job=job, version=made.version)


def _changes(asked: BulkChange) -> DesiredChanges:
    match asked.action:
        case "checkpoint":
            return DesiredChanges(checkpoint_request=True)
        case "budget":
            return DesiredChanges(budget=asked.budget)
        case "write_budget":
            return DesiredChanges(write_budget=asked.write_budget)
        case action:
            return DesiredChanges(paused=action == "pause")


def _acknowledge(db: Database, job: str, firing: Sequence[Alert], *, who: str, now: float) -> int:
    done = 0
    for alert in firing:
        with suppress(AlertResolved, UnknownAlert):  # it resolved or was deleted meanwhile
            incidents.acknowledge(db, job, alert.id, who=who, now=now)
            done += 1
    return done
