"""The account of jobs by hour: goodput of each hour multiplied by ranks, work that checkpoints saved, and bytes.

What an hour holds follows from the stored reports alone, not from when it is computed.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile

from sqlalchemy import BigInteger, bindparam, cast, func, select
from sqlalchemy.orm import Session

from holdfast.protocol.wire import INTENDED_ENDS, REQUESTED_EXITS
from holdfast_server import models
from holdfast_server.db import named_jobs
from holdfast_server.queries.goodput import (
    StandingIterations,
    end_of_attempt,
    interruptions_of_jobs,
    spans_of_jobs,
    window_bounds,
)
from holdfast_server.queries.time_buckets import BUCKETS, MICROSECONDS, AttemptTime, Interruption, Span, timesheet
from holdfast_server.records.ancestry import Ancestry, lineage_starts
from holdfast_server.records.checkpoints import DAMAGED, DURABLE, taken_at
from holdfast_server.records.failures import AttemptHistory, attempts_of_jobs, ended_by_failure
from holdfast_server.records.interval_status import paced_of
from holdfast_server.records.job_status import RELAUNCHED

HOUR, DAY = 3600, 86400
DOWN_SECONDS = 3600.0
"""Most time without an attempt that counts after an attempt that did not end as planned."""
PERSIST_SECONDS = 86400.0
"""Longest time from a snapshot until its checkpoint is durable."""
ALL_SPANS = 10**9
FIGURES = (*BUCKETS, "saved", "failures", "uncompared_failures", "written_bytes")

_decisions, _checkpoints = models.IntervalDecisionRecord, models.CheckpointRecord
# in integers, which all databases divide alike
_hour = cast(_decisions.at * 1000, BigInteger) // (HOUR * 1000)
_OVERHEADS = (
    select(_decisions.job, _hour, func.avg(_decisions.measured_overhead))
    .where(_decisions.job.in_(named_jobs()), _decisions.at >= bindparam("begins_at"))
    .where(_decisions.measured_overhead.is_not(None))
    .group_by(_decisions.job, _hour)
)
_WRITTEN = (
    select(
        _checkpoints.job, _checkpoints.at, _checkpoints.payload_bytes - _checkpoints.reused_bytes
    )
    .where(_checkpoints.job.in_(named_jobs()), taken_at() >= bindparam("taken_from"))
    .where(_checkpoints.at >= bindparam("begins_at"), _checkpoints.persist_seconds.is_not(None))
    # only a checkpoint that was durable can be missing
    .where(_checkpoints.state.in_((DURABLE, DAMAGED, "missing")))
    .order_by(_checkpoints.at)
)  # fmt: skip
_STORED = select(
    _checkpoints.job, _checkpoints.payload_bytes, _checkpoints.reused_bytes, _checkpoints.copy_place
).where(_checkpoints.job.in_(named_jobs()), _checkpoints.state.in_((DURABLE, DAMAGED)))
_STORED = _STORED.order_by(_checkpoints.job, _checkpoints.iteration, _checkpoints.lineage)


@dataclass(frozen=True, slots=True)
class AccountGroup:
    """What figures are summed by."""

    job: str
    created_at: float
    """Time of the job's first report: a later job of the same name is another one."""
    project: str
    owner: str
    labels: str
    store: str


@dataclass(slots=True)
class StoredBytes:
    """What a job has in its store, and in the store behind."""

    store: str = ""
    stored_bytes: int = 0
    backing_store: str = ""
    backing_bytes: int = 0
    is_estimate: bool = False
    unsized_checkpoints: int = 0


@dataclass(slots=True)
class JobHours:
    """The account of one job since a time."""

    figures: dict[tuple[AccountGroup, int], Counter[str]] = field(default_factory=dict)
    """By group and start of the hour; times are in microseconds multiplied by ranks."""
    last_iteration_at: float | None = None
    """End of the newest iteration."""

    def at(self, group: AccountGroup, seconds: float) -> Counter[str]:
        return self.figures.setdefault((group, int(seconds // HOUR) * HOUR), Counter())


def account_hours(
    session: Session, jobs: Sequence[models.JobRecord], begins_at: float, *, now: float
) -> dict[str, JobHours]:
    """Return the account of jobs by hour, in a fixed number of statements and one for a long attempt that failed.

    Args:
        begins_at: a whole hour.
    """
    names = [job.name for job in jobs]
    attempts = attempts_of_jobs(session, names, since=begins_at)
    lineages = lineage_starts(session, names)
    standing = {
        job.name: StandingIterations(
            [one.attempt for one in attempts.get(job.name, [])], Ancestry(lineages.get(job.name, []), job.lineage)
        )
        for job in jobs
    }
    spans = spans_of_jobs(session, standing, begins_at, now, most=ALL_SPANS)
    interruptions = interruptions_of_jobs(session, names, begins_at, now=now)
    overheads = _overheads(session, names, begins_at)
    found: dict[str, JobHours] = {}
    for job in jobs:
        found[job.name] = hours = JobHours()
        timed = _attempts(job, attempts.get(job.name, []), spans.get(job.name, []), now=now)
        _add_times(hours, timed, interruptions.get(job.name, []), overheads.get(job.name, {}), begins_at, now=now)
        _add_failures(session, hours, job, timed, standing[job.name], begins_at, now=now)
        hours.last_iteration_at = max((one.spans[-1].ends_at for one in timed if one.spans), default=None)
        found[job.name] = hours
    _add_bytes(session, found, {job.name: job for job in jobs}, attempts, begins_at)
    return found


def stored_bytes(session: Session, jobs: Sequence[models.JobRecord]) -> dict[str, StoredBytes]:
    """Return the size of the checkpoints in the stores, by job.

    A checkpoint counts with the files that it does not share with earlier ones, the oldest one with all of its
    files. That is exact unless retention deleted a checkpoint between two that share files with it.
    """
    found = {job.name: StoredBytes() for job in jobs}
    seen: set[str] = set()
    for job, payload, reused, place in session.execute(_STORED, {"jobs": list(found)}):
        one = found[job]
        own = payload - reused if job in seen else payload
        one.is_estimate |= reused > 0
        one.unsized_checkpoints += payload == 0
        if place != "behind":
            one.stored_bytes += own
            seen.add(job)
        if place is not None:
            one.backing_bytes += own
    return found


def group_of(job: models.JobRecord, attempt: models.AttemptRecord | None) -> AccountGroup:
    owner = labels = store = ""
    if attempt is not None:
        owner, labels, store = attempt.owner or "", attempt.labels or "", (*stores_of(attempt), "")[0]
    return AccountGroup(job.name, job.created_at, job.project, owner, labels, store)


def stores_of(attempt: models.AttemptRecord) -> list[str]:
    """Return the address of an attempt's store, and of the one behind it, if there is one."""
    return json.loads(attempt.stores) if attempt.stores else []


def _overheads(session: Session, jobs: Sequence[str], begins_at: float) -> dict[str, dict[int, float]]:
    """Return by job and hour the mean overhead that its agent measured; a negative one is noise."""
    found: dict[str, dict[int, float]] = {}
    for job, hour, mean in session.execute(_OVERHEADS, {"jobs": list(jobs), "begins_at": begins_at}):
        if math.isfinite(mean):
            found.setdefault(job, {})[int(hour) * HOUR] = max(0.0, float(mean))
    return found


# ---- times ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempt:
    """An attempt of a job, its iterations, and for how long the time after it counts."""

    attempt: models.AttemptRecord
    following: models.AttemptRecord | None
    group: AccountGroup
    ranks: int
    begins_at: float
    ends_at: float
    """When it ended or last reported; now while it runs."""
    down_until: float
    """Until when the time without an attempt counts."""
    until: float
    """Start of the next attempt, or end of the account."""
    spans: Sequence[Span]


def _attempts(
    job: models.JobRecord, histories: Sequence[AttemptHistory], spans: Sequence[Span], *, now: float
) -> list[_Attempt]:
    by_uid: dict[str, list[Span]] = {}
    for span in sorted(spans, key=lambda span: span.begins_at):
        by_uid.setdefault(span.uid, []).append(span)
    _, end = window_bounds(histories, 0.0, now=now)
    ordered = sorted(histories, key=lambda one: one.attempt.started_at)
    made: list[_Attempt] = []
    reached = 0.0
    for number, one in enumerate(ordered):
        attempt, own = one.attempt, by_uid.get(one.attempt.uid, [])
        following = ordered[number + 1].attempt if number + 1 < len(ordered) else None
        until = end if following is None else min(max(reached, following.started_at), end)
        # an attempt lived at least as long as it trained
        ended_at = max(end_of_attempt(job, one, now=now), own[-1].ends_at if own else 0.0)
        ended_at = max(reached, min(ended_at, until))
        made.append(
            _Attempt(
                attempt=attempt, following=following, group=group_of(job, attempt),
                ranks=max(1, attempt.world_size), begins_at=max(reached, attempt.started_at), ends_at=ended_at,
                down_until=ended_at if _was_planned(attempt, following) else min(until, ended_at + DOWN_SECONDS),
                until=until, spans=own,
            )
        )  # fmt: skip
        reached = until
    return made


def _was_planned(attempt: models.AttemptRecord, following: models.AttemptRecord | None) -> bool:
    """Return whether an attempt ended as planned, so that its GPUs are taken to be free after it."""
    if attempt.finished is not None:
        return attempt.finished in INTENDED_ENDS and attempt.finished != RELAUNCHED
    return following is not None and following.previous_exit in REQUESTED_EXITS


def _add_times(
    hours: JobHours,
    attempts: Sequence[_Attempt],
    interruptions: Sequence[Interruption],
    overheads: Mapping[int, float],
    begins_at: float,
    *,
    now: float,
) -> None:
    for one in attempts:
        place = 0
        for begin, end in _hours_between(max(begins_at, one.begins_at), min(one.down_until, now)):
            while place < len(one.spans) and one.spans[place].ends_at <= begin:
                place += 1
            time = AttemptTime(
                uid=one.attempt.uid, started_at=one.begins_at, ended_at=one.ends_at,
                trained_before=place > 0 or _trained_before(one, begin),
            )  # fmt: skip
            own = [*_begun_before(one.spans, place, end)]
            gaps = [gap for gap in interruptions if gap.begins_at < end and gap.ends_at > begin]
            hour = int(begin // HOUR) * HOUR
            sheet = timesheet([time], own, gaps, begins_at=begin, ends_at=end, overhead=overheads.get(hour, 0.0))
            figures = hours.at(one.group, begin)
            for name, microseconds in sheet.buckets.items():
                if microseconds:
                    figures[name] += microseconds * one.ranks


def _begun_before(spans: Sequence[Span], place: int, end: float) -> Iterator[Span]:
    return takewhile(lambda span: span.begins_at < end, islice(spans, place, None))


def _hours_between(begin: float, end: float) -> Iterator[tuple[float, float]]:
    while begin < end:
        until = min(end, (begin // HOUR + 1) * HOUR)
        yield begin, until
        begin = until


def _trained_before(one: _Attempt, at: float) -> bool:
    """Return whether an attempt finished iterations before a time and before its first known span."""
    if not one.spans:
        return one.attempt.started_at < at and one.attempt.iterations > 0
    first = one.spans[0]
    return first.begins_at < at or first.first_iteration > one.attempt.iteration + 1


# ---- failures, and what checkpoints saved -----------------------------------------------------------


def _add_failures(
    session: Session,
    hours: JobHours,
    job: models.JobRecord,
    attempts: Sequence[_Attempt],
    standing: StandingIterations,
    begins_at: float,
    *,
    now: float,
) -> None:
    """Count failures at their ends, and what checkpoints saved at the start of the next attempt."""
    paced = paced_of(job)
    epoch = paced.epoch_iterations if paced else None
    for one in attempts:
        if not ended_by_failure(job, one.attempt, one.following):
            continue
        if one.ends_at >= begins_at:
            hours.at(one.group, one.ends_at)["failures"] += 1
        following = one.following
        if following is None or one.until < begins_at or not (following.versions or following.iterations):
            continue
        first, last = one.attempt.iteration, following.iteration
        if not one.attempt.iterations or last <= first:
            continue
        figures = hours.at(one.group, one.until)
        if not epoch:
            figures["uncompared_failures"] += 1
        elif (kept_from := max(first, last // epoch * epoch)) < last:
            spans = one.spans
            if one.attempt.started_at < begins_at:
                spans = _all_spans(session, job.name, one.attempt, standing, now=now)
            figures["saved"] += _time_after(spans, kept_from) * one.ranks


def _all_spans(
    session: Session, job: str, attempt: models.AttemptRecord, standing: StandingIterations, *, now: float
) -> list[Span]:
    found = spans_of_jobs(session, {job: standing}, attempt.started_at, now, most=ALL_SPANS)
    return [span for span in found.get(job, []) if span.uid == attempt.uid]


def _time_after(spans: Sequence[Span], iteration: int) -> int:
    """Return the microseconds of the iterations after one that stand."""
    seconds = 0.0
    for span in spans:
        rows = span.last_iteration - span.first_iteration + 1
        kept = min(span.last_iteration, span.stands_upto) - max(span.first_iteration - 1, iteration)
        seconds += span.seconds * max(0, kept) / rows
    return round(seconds * MICROSECONDS)


# ---- bytes ------------------------------------------------------------------------------------------


def _add_bytes(
    session: Session,
    found: Mapping[str, JobHours],
    jobs: Mapping[str, models.JobRecord],
    attempts: Mapping[str, Sequence[AttemptHistory]],
    begins_at: float,
) -> None:
    asked = {"jobs": list(found), "begins_at": begins_at, "taken_from": begins_at - PERSIST_SECONDS}
    for job, at, written in session.execute(_WRITTEN, asked):
        started = [one.attempt for one in attempts.get(job, []) if one.attempt.started_at <= at]
        attempt = max(started, key=lambda attempt: attempt.started_at, default=None)
        found[job].at(group_of(jobs[job], attempt), at)["written_bytes"] += written
