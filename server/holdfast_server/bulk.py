"""One budget for several jobs, each changed or refused by itself."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.answers import BulkOutcome, DesiredChanges
from holdfast_server import control, models
from holdfast_server.accounts.principal import Principal, Role
from holdfast_server.db import Database
from holdfast_server.errors import InvalidSetting, Refused, UnknownJob

MOST_JOBS = 200


async def set_budget(
    db: Database, jobs: Sequence[str], budget: float | str | None, *, asker: Principal, now: float
) -> list[BulkOutcome]:
    """What became of each, in their order. None: back to the script's own.

    Raises:
        InvalidSetting: no job, or too many. What one job refuses is its own outcome.
    """
    wanted = list(dict.fromkeys(jobs))
    if not 1 <= len(wanted) <= MOST_JOBS:
        raise InvalidSetting(
            "jobs", f"{len(wanted)} jobs are selected: from 1 to {MOST_JOBS} can be changed at once"
        )
    return [await _set(db, job, budget, asker=asker, now=now) for job in wanted]


async def _set(db: Database, job: str, budget: float | str | None, *, asker: Principal, now: float) -> BulkOutcome:
    try:
        await _require_operator(db, job, asker)
        changes = DesiredChanges(budget=budget)
        desired = await control.edit(db, job, changes, version=None, who=asker.name, now=now)
    except Refused as refusal:
        return BulkOutcome(job=job, version=None, refusal=str(refusal))
    return BulkOutcome(job=job, version=desired.version, refusal="")


async def _require_operator(db: Database, job: str, asker: Principal) -> None:
    """UnknownJob, as for a job that is not there, to those who may not see it."""
    async with db.read() as session:
        row = await session.get(models.Job, job)
    role = None if row is None else asker.role_in(row.project)
    if row is None or role is None:
        raise UnknownJob(job)
    if role < Role.operator:
        raise Refused(f"you may see {job}, and not change it")
