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
from holdfast.protocol.fleet import BulkAction, BulkChange, BulkOutcome, BulkResult
from holdfast.protocol.jobs import DesiredChanges, JobStatus
from holdfast.protocol.orders import parse_on_trouble
from holdfast_server import models
from holdfast_server.alerts import incidents
from holdfast_server.control import approvals, archive, control, deletion
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
from holdfast_server.records import training_halts
from holdfast_server.records.checkpoints import NAMED_AT_ONCE
from holdfast_server.records.job_status import ALIVE, ENDED, current_attempt, status_in_sql

MOST_JOBS = 2000
"""Most jobs that can be changed in one request."""
JOBS_AT_ONCE = 64
"""Jobs that are changed concurrently: they share commits, and leave the queue of writes to the agents."""
FAR_REACHING: tuple[BulkAction, ...] = ("pause_training", "delete")
"""Actions for which a person must have entered the password recently, as for one job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _JobState:
    """What decides whether a change applies to a job."""

    project: str
    status: JobStatus
    paused: bool
    has_pause: bool
    """Whether training is paused, or a pause is ordered."""
    archived: bool
    protected: bool
    budget: float | None
    write_bytes_per_second: float | None
    on_trouble: str | None
    firing: list[Alert]


def change(db: Database, asked: BulkChange, *, asker: Principal, now: float) -> BulkResult:
    """Change all selected jobs that the change applies to, and return the outcome of each.

    Each job is changed, refused and audited on its own, as by a change of that job alone.

    Raises:
        InvalidSetting: the value is not valid; or no job, or too many, are selected.
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
        return _apply(db, job, asked, state.firing, asker=asker, now=now)

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
            labels=tuple(wanted.labels), archived=wanted.archived, visible_projects=asker.visible_projects,
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
        job.name, job.project, job.paused, job.budget, job.write_bytes_per_second, job.on_trouble, job.archived_at,
        job.last_contact_at, job.protected, job.training_order, job.training_paused_at,
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
                    has_pause=training_halts.has_pause(row.training_order, row.training_paused_at),
                    archived=archive.is_archived(row), protected=row.protected,
                    write_bytes_per_second=row.write_bytes_per_second, on_trouble=row.on_trouble, firing=firing,
                )  # fmt: skip
    return found


def not_running(db: Database, names: Sequence[str], *, now: float) -> list[str]:
    """Return those of the jobs that have ended, in their order: a setting of theirs applies at the next start."""
    states = _states(db, list(names), with_alerts=False, now=now)
    return [name for name in names if name in states and states[name].status in ENDED]


def _wanted(asked: BulkChange) -> float | str | None:
    """Return the new value of the setting; `None`: the script's own. ValueError: it is not valid."""
    if asked.action == "on_trouble":
        return None if asked.on_trouble is None else str(parse_on_trouble(asked.on_trouble))
    if asked.action == "budget":
        return None if asked.budget is None else parse_budget(asked.budget)
    return None if asked.write_budget is None else parse_write_budget(asked.write_budget)


def _refusal(
    job: str, state: _JobState | None, asked: BulkChange, wanted: float | str | None, asker: Principal
) -> str:
    """Return why a change does not apply to a job; empty if it does."""
    role = None if state is None else asker.role_in(state.project)
    if state is None or role is None:
        return str(UnknownJob(job))
    if role < Role.operator:
        return str(PermissionDenied(f"you may view {job}, but not change it"))
    if asked.action == "delete" and role < Role.admin:
        return str(PermissionDenied(f"only an administrator of its project may delete {job}"))
    match asked.action:
        case "checkpoint" if state.status not in ALIVE:
            return f"the job is {state.status}: no agent would take the checkpoint"
        case "pause" if state.paused:
            return "checkpoints are paused already"
        case "pause" if state.status == "finished":
            return "the job is finished"
        case "resume" if not state.paused:
            return "checkpoints are not paused"
        case "pause_training" if state.status not in ALIVE:
            return f"the job is {state.status}: its training does not run"
        case "pause_training" if state.has_pause:
            return "training is paused already"
        case "continue_training" if not state.has_pause:
            return "training is not paused"
        case "budget" if state.budget == wanted:
            return "it has this budget already"
        case "write_budget" if state.write_bytes_per_second == wanted:
            return "it has this write budget already"
        case "on_trouble" if state.on_trouble == wanted:
            return "it has this reaction already"
        case "archive" | "delete" if state.status not in (*ENDED, "silent"):
            return f"the job is {state.status}: stop it first"
        case "delete" if state.protected:
            return "the job is protected: remove the protection first"
        case "archive" if state.archived:
            return "the job is archived already"
        case "unarchive" if not state.archived:
            return "the job is not archived"
        case "acknowledge" if not state.firing:
            return "no alert is firing"
        case _:
            return ""


def _apply(
    db: Database, job: str, asked: BulkChange, firing: Sequence[Alert], *, asker: Principal, now: float
) -> BulkOutcome:
    who = asker.name
    try:
        if asked.action == "acknowledge":
            return BulkOutcome(job=job, alerts=_acknowledge(db, job, firing, who=who, now=now))
        if asked.action == "delete":
            deletion.delete_job(db, job, who=who, now=now)
            return BulkOutcome(job=job)
        if asked.action in ("archive", "unarchive"):
            archive.mark(db, job, archived=asked.action == "archive", who=who, now=now)
            return BulkOutcome(job=job)
        if asked.action == "pause_training":
            made = approvals.order_training(db, job, "pause", asker=asker, now=now)
        elif asked.action == "continue_training":
            made = control.order_training(db, job, "continue", who=who, now=now)
        else:
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
        case "on_trouble":
            return DesiredChanges(on_trouble=asked.on_trouble)
        case action:
            return DesiredChanges(paused=action == "pause")


def _acknowledge(db: Database, job: str, firing: Sequence[Alert], *, who: str, now: float) -> int:
    done = 0
    for alert in firing:
        with suppress(AlertResolved, UnknownAlert):  # it resolved or was deleted meanwhile
            incidents.acknowledge(db, job, alert.id, who=who, now=now)
            done += 1
    return done
