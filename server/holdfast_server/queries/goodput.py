"""Goodput of a job over a window: the share of time that advanced training, and how the rest was spent."""

from __future__ import annotations

import math
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import BigInteger, Float, bindparam, case, cast, func, or_, select
from sqlalchemy.orm import Session

from holdfast.protocol.analyses import Goodput, TimeBucket
from holdfast.protocol.timeline import ShortWindow, StallsOverTime, Window
from holdfast.protocol.wire import INTENDED_ENDS, StallKind
from holdfast_server import models
from holdfast_server.db import Database, named_jobs
from holdfast_server.queries.job_view import JobView, find_job
from holdfast_server.queries.time_buckets import (
    BUCKETS,
    DEFINITIONS,
    MICROSECONDS,
    AttemptTime,
    Interruption,
    Span,
    Timesheet,
    timesheet,
)
from holdfast_server.records.ancestry import Ancestry, LineageStart, ancestry_of, lineage_starts
from holdfast_server.records.failures import AttemptHistory, attempts_of, attempts_of_jobs
from holdfast_server.records.job_status import RELAUNCHED, has_no_process, status_of
from holdfast_server.records.rank_totals import bucket_of

WINDOWS: dict[str, float] = {"10m": 600.0, "1h": 3600.0, "24h": 86400.0, "7d": 604800.0}
"""Durations of the windows; any other window is all time."""
MAX_SPANS = 2000
"""Default of the spans of work that are read of a job and a window."""
_totals = models.RankTotalsRecord
_LEAST, _MOST = ("begins_at", "first_iteration"), ("ends_at", "last_iteration")
_SUMS = ("seconds", "stall_seconds", "data_seconds", "barrier_seconds")
_SPAN = ("uid", *_LEAST, *_MOST, *_SUMS)
"""Fields of a span of work, in the order of the query."""
_SPANS = (
    select(
        _totals.job,
        _totals.lineage,
        _totals.uid,
        *(func.min(getattr(_totals, name)) for name in _LEAST),
        *(func.max(getattr(_totals, name)) for name in _MOST),
        *(func.sum(getattr(_totals, name)) for name in _SUMS),
    )
    .where(
        _totals.job.in_(named_jobs()), _totals.rank == 0, _totals.bucket >= bindparam("first", type_=BigInteger())
    )
    .group_by(_totals.job, _totals.uid, _totals.lineage, _totals.bucket // bindparam("each", type_=BigInteger()))
)
"""Selects rank 0's totals, with `each` buckets combined."""
_decisions = models.IntervalDecisionRecord
_OVERHEADS = (
    select(_decisions.job, func.avg(_decisions.measured_overhead))
    .where(_decisions.job.in_(named_jobs()), _decisions.at >= bindparam("begins_at"))
    .where(_decisions.measured_overhead.is_not(None))
    .group_by(_decisions.job)
)
_stalls, _breaks = models.StallRecord, models.TrainingPauseRecord
_RESTORES = select(_stalls.job, _stalls.at, _stalls.seconds).where(
    _stalls.job.in_(named_jobs()), _stalls.kind == "restore", _stalls.at >= bindparam("begins_at", type_=Float())
)
_PAUSES = select(_breaks.job, _breaks.uid, _breaks.at, _breaks.ended_at).where(
    _breaks.job.in_(named_jobs()),
    or_(_breaks.ended_at.is_(None), _breaks.ended_at > bindparam("begins_at", type_=Float())),
)
_JOBS = select(models.JobRecord).where(models.JobRecord.name.in_(named_jobs()))
STALL_INTERVALS = 60
"""Number of equal intervals of time in the chart of stalls."""


def begin_of(window: Window | ShortWindow, *, now: float) -> float:
    """Return when a window begins; 0 for all time."""
    return now - WINDOWS[window] if window in WINDOWS else 0.0


def goodput(db: Database, job: str, window: Window, *, now: float) -> Goodput:
    """Raises UnknownJob."""
    with db.read() as session:
        sheet = _timesheet(session, find_job(session, job), window, now=now)
    wall = sheet.wall
    return Goodput(
        job=job,
        window=window,
        begins_at=sheet.begins_at,
        ends_at=sheet.ends_at,
        wall_seconds=wall / MICROSECONDS,
        goodput=sheet.buckets["productive"] / wall if wall else None,
        iterations=sheet.iterations,
        lost_iterations=sheet.lost_iterations,
        buckets=[
            TimeBucket(
                name=name,
                seconds=sheet.buckets[name] / MICROSECONDS,
                share=sheet.buckets[name] / wall if wall else 0.0,
                definition=DEFINITIONS[name],
            )
            for name in BUCKETS
        ],
    )


@dataclass(frozen=True, slots=True)
class GoodputShare:
    """The goodput of a job, and the time that it is a share of: shorter than the window for a young job."""

    share: float
    wall_seconds: float


def shares(session: Session, jobs: Sequence[str], window: ShortWindow, *, now: float) -> dict[str, GoodputShare]:
    """Return the goodput of many jobs, of those with an attempt in the window, in a fixed number of statements.

    How the rest of the time was spent does not affect goodput, and is not computed.
    """
    rows = {row.name: row for row in session.scalars(_JOBS, {"jobs": jobs})}
    return _shares(session, rows, lineage_starts(session, list(rows)), begin_of(window, now=now), now=now)


def share(view: JobView, window: ShortWindow) -> GoodputShare | None:
    """Return the goodput of one job; None without an attempt in the window."""
    rows, lineages = {view.name: view.job}, {view.name: view.lineages}
    return _shares(view.session, rows, lineages, begin_of(window, now=view.now), now=view.now).get(view.name)


def _shares(
    session: Session,
    rows: Mapping[str, models.JobRecord],
    lineages: Mapping[str, list[LineageStart]],
    begins_at: float,
    *,
    now: float,
) -> dict[str, GoodputShare]:
    attempts = attempts_of_jobs(session, list(rows), since=begins_at)
    standing = {
        name: StandingIterations(
            [one.attempt for one in attempts.get(name, [])], Ancestry(lineages.get(name, []), row.lineage)
        )
        for name, row in rows.items()
    }
    spans = spans_of_jobs(session, standing, begins_at, now)
    overheads = mean_overheads(session, list(rows), begins_at)
    found: dict[str, GoodputShare] = {}
    for name, row in rows.items():
        sheet = _productive(
            row, attempts.get(name, []), spans.get(name, []), begins_at, overheads.get(name, 0.0), now=now
        )
        if sheet.wall:
            found[name] = GoodputShare(sheet.buckets["productive"] / sheet.wall, sheet.wall / MICROSECONDS)
    return found


def _productive(
    job: models.JobRecord,
    attempts: Sequence[AttemptHistory],
    spans: Sequence[Span],
    begins_at: float,
    overhead: float,
    *,
    now: float,
) -> Timesheet:
    begins_at, ends_at = window_bounds(attempts, begins_at, now=now)
    times = [
        AttemptTime(
            uid=one.attempt.uid, started_at=one.attempt.started_at, ended_at=end_of_attempt(job, one, now=now)
        )
        for one in attempts
    ]
    return timesheet(times, spans, (), begins_at=begins_at, ends_at=ends_at, overhead=overhead)


def _timesheet(session: Session, job: models.JobRecord, window: Window, *, now: float) -> Timesheet:
    attempts = attempts_of(session, job, since=begin_of(window, now=now))
    begins_at, ends_at = window_bounds(attempts, begin_of(window, now=now), now=now)
    standing = StandingIterations([one.attempt for one in attempts], ancestry_of(session, job))
    return timesheet(
        [_attempt_time(session, job, one, begins_at, now=now) for one in attempts],
        spans_of_jobs(session, {job.name: standing}, begins_at, ends_at).get(job.name, []),
        interruptions_of_jobs(session, [job.name], begins_at, now=now).get(job.name, []),
        begins_at=begins_at,
        ends_at=ends_at,
        overhead=mean_overheads(session, [job.name], begins_at).get(job.name, 0.0),
    )


def _attempt_time(
    session: Session, job: models.JobRecord, one: AttemptHistory, begins_at: float, *, now: float
) -> AttemptTime:
    attempt, ended_at = one.attempt, end_of_attempt(job, one, now=now)
    cut = attempt.started_at < begins_at < ended_at
    return AttemptTime(
        uid=attempt.uid,
        started_at=attempt.started_at,
        ended_at=ended_at,
        trained_before=cut and _trained_before(session, attempt, begins_at),
    )


def window_bounds(attempts: Sequence[AttemptHistory], begins_at: float, *, now: float) -> tuple[float, float]:
    """Cut a window to the time since the first start, and to the end of a job that ended as planned: then it is
    not down."""
    begins_at = max(begins_at, min((one.attempt.started_at for one in attempts), default=now))
    last = attempts[-1].attempt if attempts else None
    if (
        last is None
        or last.finished not in INTENDED_ENDS
        or last.finished == RELAUNCHED
        or last.finished_at is None
    ):
        return begins_at, max(begins_at, now)
    return begins_at, max(begins_at, min(now, last.finished_at))


def end_of_attempt(job: models.JobRecord, one: AttemptHistory, *, now: float) -> float:
    """Return when an attempt ended: as it reported, else its last report; `now` while it runs."""
    attempt = one.attempt
    if attempt.finished_at is not None:
        return attempt.finished_at
    if attempt.uid == job.uid:
        runs = status_of(job, attempt, now=now).alive and not has_no_process(attempt)
        return now if runs else job.last_contact_at
    return attempt.started_at if one.heard_at is None else one.heard_at


class StandingIterations:
    """The iterations of each attempt that stand.

    A restore abandons iterations outside the current ancestry. On the same lineage, an attempt loses the
    iterations from which on a later attempt started again.
    """

    def __init__(self, attempts: Sequence[models.AttemptRecord], ancestry: Ancestry) -> None:
        self._upto = ancestry.upto
        self._ends: dict[tuple[str, int], int] = {}
        """Iteration at which a later attempt started, by attempt and lineage."""
        begun: dict[int, int] = {}
        for attempt in reversed(attempts):
            self._ends |= {(attempt.uid, lineage): iteration for lineage, iteration in begun.items()}
            if attempt.versions:  # until it reports where it starts, it has discarded nothing
                begun[attempt.lineage] = min(attempt.iteration, begun.get(attempt.lineage, attempt.iteration))

    def upto(self, uid: str, lineage: int) -> int:
        """Return the last iteration of an attempt on a lineage that stands."""
        upto = self._upto.get(lineage, -1)
        return min(upto, self._ends.get((uid, lineage), upto))


def spans_of_jobs(
    session: Session,
    standing: Mapping[str, StandingIterations],
    begins_at: float,
    ends_at: float,
    *,
    most: int = MAX_SPANS,
) -> dict[str, list[Span]]:
    """Return about `most` spans of each job; of a longer window, longer ones."""
    first, last = bucket_of(begins_at), bucket_of(ends_at)
    asked = {"jobs": list(standing), "first": first, "each": max(1, (last - first) // most)}
    found: dict[str, list[Span]] = {}
    for job, lineage, *values in session.execute(_SPANS, asked):
        span = dict(zip(_SPAN, values, strict=True))
        upto = standing[job].upto(span["uid"], lineage)
        found.setdefault(job, []).append(Span(stands_upto=upto, lineage=lineage, **span))
    return found


def _trained_before(session: Session, attempt: models.AttemptRecord, at: float) -> bool:
    rows = models.RankTotalsRecord
    query = (
        select(rows.uid)
        .where(rows.job == attempt.job, rows.rank == 0, rows.bucket <= bucket_of(at))
        .where(rows.uid == attempt.uid, rows.begins_at < at)
        .order_by(rows.bucket.desc())
        .limit(1)
    )
    return session.scalar(query) is not None


def interruptions_of_jobs(
    session: Session, jobs: Sequence[str], begins_at: float, *, now: float
) -> dict[str, list[Interruption]]:
    """Return the restores in place and the pauses of jobs since a time."""
    asked = {"jobs": list(jobs), "begins_at": begins_at}
    found: dict[str, list[Interruption]] = {}
    for job, at, seconds in session.execute(_RESTORES, asked):
        found.setdefault(job, []).append(Interruption("restoring", at - seconds, at))
    for job, uid, at, ended_at in session.execute(_PAUSES, asked):
        until = now if ended_at is None else ended_at
        found.setdefault(job, []).append(Interruption("paused", at, until, uid))
    return found


def mean_overheads(session: Session, jobs: Sequence[str], begins_at: float) -> dict[str, float]:
    """Return the mean overhead that the agents measured in a window; a negative one is noise."""
    found = session.execute(_OVERHEADS, {"jobs": list(jobs), "begins_at": begins_at})
    return {job: max(0.0, mean) for job, mean in found if math.isfinite(mean)}


# ---- stalls over time


def stalls_over_time(db: Database, job: str, window: Window, *, now: float) -> StallsOverTime:
    """Return the stalls by kind and interval of time. Raises UnknownJob.

    A stall is reported at its end. The part that exceeds an interval counts for earlier intervals, except what
    lies before the window.
    """
    rows, attempts = models.StallRecord, models.AttemptRecord
    with db.read() as session:
        row = find_job(session, job)
        first = session.scalar(select(func.min(attempts.started_at)).where(attempts.job == job))
        begins_at = max(begin_of(window, now=now), first or row.created_at)
        ends_at = max(now, begins_at + 1)
        interval = (ends_at - begins_at) / STALL_INTERVALS
        # In integers, which all databases divide alike.
        place = cast((rows.at - begins_at) * 1000, BigInteger) // max(1, round(interval * 1000))
        bucket = case((place < STALL_INTERVALS, place), else_=STALL_INTERVALS - 1).label("bucket")
        query = (
            select(rows.kind, bucket, func.sum(rows.seconds))
            .where(rows.job == job, rows.at >= begins_at)
            .group_by(rows.kind, bucket)
        )
        found = session.execute(query).all()
    ended: dict[str, list[float]] = {}
    for kind, number, waited in found:
        ended.setdefault(kind, [0.0] * STALL_INTERVALS)[number] = waited
    seconds = {typing.cast("StallKind", kind): _spread(waited, interval) for kind, waited in ended.items()}
    return StallsOverTime(
        job=job,
        window=window,
        begins_at=begins_at,
        ends_at=ends_at,
        stretch_seconds=interval,
        seconds=dict(sorted(seconds.items(), key=lambda item: -sum(item[1]))),
    )


def _spread(ended: list[float], interval: float) -> list[float]:
    """Spread waits, given by the interval in which they ended, over the intervals in which they took place."""
    spread, over = [0.0] * len(ended), 0.0
    for place in reversed(range(len(ended))):
        waited = ended[place] + over
        spread[place] = min(waited, interval)
        over = waited - spread[place]
    return spread
