"""Comparison of a job's ranks over a window."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from holdfast.protocol.analyses import RankInfo, RankTimes
from holdfast.protocol.timeline import ShortWindow
from holdfast_server import models
from holdfast_server.core.encoding import answer_from
from holdfast_server.db import Database
from holdfast_server.queries.goodput import begin_of
from holdfast_server.queries.job_view import find_job
from holdfast_server.records.attempt_reports import places_of
from holdfast_server.records.rank_totals import bucket_of

DEVIATIONS = 3.0
LEAST_SHARE = 0.05
"""A slow rank exceeds the median by so many median deviations and by this share of the median."""
LEAST_SECONDS = 60.0
"""Time of training below which the newest totals of a rank say nothing yet."""
OWN = "own time: iterations without waits for other ranks"
WHOLE = "whole iterations, which are alike if ranks wait for each other"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMeans:
    """Mean seconds per iteration of one rank."""

    rank: int
    iterations: int
    iteration_seconds: float
    longest_seconds: float
    stall_seconds: float
    data_seconds: float
    barrier_seconds: float | None

    @property
    def own_seconds(self) -> float:
        return max(0.0, self.iteration_seconds - (self.barrier_seconds or 0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankComparison:
    measure: str
    own_seconds: dict[int, float]
    """The compared time, by rank."""
    median_seconds: float
    deviation_seconds: float
    slow: dict[int, str]
    """Main cause of the difference, by slow rank."""
    waited_for: int | None
    waits_seconds: dict[int, float]
    """Additional time at the barrier compared with the rank `waited_for`, by rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFindings:
    """What holds up the iterations of a job, over the newest 10 to 20 minutes of its attempt."""

    data_seconds: float
    seconds: float
    iterations: int
    """Iterations of rank 0 in that time."""
    slowest: int | None = None
    """The slow rank that takes longest."""
    slower: float = 0.0
    """By how much it takes longer than the median, as a share of it."""
    slower_seconds: float = 0.0
    """The same in seconds of an iteration."""
    why: str = ""

    @property
    def data_share(self) -> float:
        """The share of rank 0's time that waited for data."""
        return self.data_seconds / self.seconds

    @property
    def data_seconds_each(self) -> float:
        """The time of an iteration that waited for data."""
        return self.data_seconds / self.iterations


def rank_times(db: Database, job: str, window: ShortWindow, *, now: float) -> RankTimes:
    """Compare the ranks of the current attempt; earlier ones may have run elsewhere. Raises UnknownJob."""
    with db.read() as session:
        found = find_job(session, job)
        attempt = session.get(models.AttemptRecord, (job, found.uid))
        means = _means(session, [found], since=begin_of(window, now=now)).get(job, [])
        places = places_of(session, job, found.uid)
    world_size = max(1, attempt.world_size) if attempt else 1
    return _answer(job, window, world_size, means, places)


def rank_heat(
    db: Database, job: str, ranks: Collection[int], window: ShortWindow, measure: str, *, now: float
) -> dict[int, list[float | None]]:
    """Return seconds per iteration of these ranks for every ten minutes of the window, of the current attempt.

    `measure` is that of `rank_times`. None: the rank reported no iterations.
    """
    rows = models.RankTotalsRecord
    with db.read() as session:
        found = find_job(session, job)
        first, last = bucket_of(begin_of(window, now=now)), bucket_of(now)
        query = (
            select(
                rows.rank,
                rows.bucket,
                func.sum(rows.iterations),
                func.sum(rows.seconds),
                func.sum(rows.barrier_seconds),
                func.sum(rows.barrier_iterations),
            )
            .where(rows.job == job, rows.rank.in_(list(ranks)), rows.bucket >= first, rows.bucket <= last)
            .where(rows.uid == found.uid)
            .group_by(rows.rank, rows.bucket)
            .having(func.sum(rows.iterations) > 0)
        )
        totals = session.execute(query).all()
    heat: dict[int, list[float | None]] = {rank: [None] * (last - first + 1) for rank in ranks}
    for rank, bucket, iterations, seconds, barrier, measured in totals:
        waited = barrier / int(measured) if measured and measure == OWN else 0.0
        heat[rank][bucket - first] = max(0.0, seconds / int(iterations) - waited)
    return heat


def findings(session: Session, jobs: Sequence[models.JobRecord], *, now: float) -> dict[str, RankFindings]:
    """Return what holds up each of some jobs, in one statement; without those that have just begun."""
    found: dict[str, RankFindings] = {}
    for job, means in _means(session, jobs, since=begin_of("10m", now=now)).items():
        first = means[0]
        seconds = first.iteration_seconds * first.iterations
        if first.rank or seconds < LEAST_SECONDS:
            continue
        compared = compare(means)
        slowest = max(compared.slow, key=compared.own_seconds.__getitem__, default=None)
        middle = compared.median_seconds
        found[job] = RankFindings(
            data_seconds=first.data_seconds * first.iterations,
            seconds=seconds,
            iterations=first.iterations,
            slowest=slowest,
            slower_seconds=0.0 if slowest is None else compared.own_seconds[slowest] - middle,
            slower=compared.own_seconds[slowest] / middle - 1 if slowest is not None and middle else 0.0,
            why="" if slowest is None else compared.slow[slowest],
        )
    return found


def _means(session: Session, jobs: Sequence[models.JobRecord], *, since: float) -> dict[str, list[RankMeans]]:
    """Return by job the means of each rank of the current attempt, from whole rows of ten minutes."""
    rows, job_rows = models.RankTotalsRecord, models.JobRecord
    query = (
        select(
            rows.job,
            rows.rank,
            func.sum(rows.iterations).label("iterations"),
            func.sum(rows.seconds).label("seconds"),
            func.max(rows.longest_seconds).label("longest_seconds"),
            func.sum(rows.stall_seconds).label("stall_seconds"),
            func.sum(rows.data_seconds).label("data_seconds"),
            func.sum(rows.barrier_iterations).label("barrier_iterations"),
            func.sum(rows.barrier_seconds).label("barrier_seconds"),
        )
        .join(job_rows, job_rows.name == rows.job)
        .where(rows.job.in_([job.name for job in jobs]), rows.bucket >= bucket_of(since), rows.uid == job_rows.uid)
        .group_by(rows.job, rows.rank)
        .having(func.sum(rows.iterations) > 0)
        .order_by(rows.job, rows.rank)
    )
    found: dict[str, list[RankMeans]] = {}
    for row in session.execute(query):
        means = RankMeans(
            rank=row.rank,
            iterations=int(row.iterations),
            iteration_seconds=row.seconds / int(row.iterations),
            longest_seconds=row.longest_seconds,
            stall_seconds=row.stall_seconds / int(row.iterations),
            data_seconds=row.data_seconds / int(row.iterations),
            barrier_seconds=row.barrier_seconds / int(row.barrier_iterations) if row.barrier_iterations else None,
        )
        found.setdefault(row.job, []).append(means)
    return found


def _answer(
    job: str,
    window: ShortWindow,
    world_size: int,
    means: Sequence[RankMeans],
    places: Mapping[int, models.RankPlaceRecord],
) -> RankTimes:
    found = compare(means) if means else None
    waits = found.waits_seconds if found else {}
    waited_for = found.waited_for if found else None
    middle = found.median_seconds if found else 0.0
    compared = found.own_seconds if found else {}
    slow = found.slow if found else {}
    rows = [
        answer_from(
            rank,
            RankInfo,
            own_seconds=compared[rank.rank],
            waits_seconds=waits.get(rank.rank),
            deviation=compared[rank.rank] / middle - 1 if middle else 0.0,
            straggler=rank.rank in slow,
            cause=slow.get(rank.rank, ""),
            host=place.host if (place := places.get(rank.rank)) else "",
            device=place.device if place else "",
            scheduler_job=place.scheduler_job if place else "",
        )
        for rank in means
    ]
    return RankTimes(
        job=job,
        window=window,
        world_size=world_size,
        reporting=len(means),
        measure=found.measure if found else "",
        median_seconds=found.median_seconds if found else None,
        deviation_seconds=found.deviation_seconds if found else None,
        waited_for=waited_for,
        waiting_gpu_seconds=sum(waits.values()) if waited_for is not None else None,
        stragglers=sorted(slow),
        ranks=sorted(rows, key=lambda row: (-row.own_seconds, row.rank)),
    )


# ---- slow ranks, from their means over a window ---------------------------------------------------
#
# Ranks that train together finish each iteration together: a slow rank shows by its own time, and by how little
# it waits for the others.


def compare(ranks: Sequence[RankMeans]) -> RankComparison:
    """Compare at least one rank, with the lower median, so that the slower one of two ranks is detected."""
    measured = all(rank.barrier_seconds is not None for rank in ranks)
    times = {rank.rank: rank.own_seconds if measured else rank.iteration_seconds for rank in ranks}
    middle = median_low(times.values())
    deviation = median_low(abs(seconds - middle) for seconds in times.values())
    limit = middle + max(DEVIATIONS * deviation, LEAST_SHARE * middle)
    usual_data = median_low(rank.data_seconds for rank in ranks)
    usual_stall = median_low(rank.stall_seconds for rank in ranks)
    slow = {
        rank.rank: _cause(
            times[rank.rank] - middle, rank.data_seconds - usual_data, rank.stall_seconds - usual_stall
        )
        for rank in ranks
        if times[rank.rank] > limit
    }
    waited_for, waits = _waits(ranks) if measured and len(ranks) > 1 else (None, {})
    return RankComparison(
        measure=OWN if measured else WHOLE,
        own_seconds=times,
        median_seconds=middle,
        deviation_seconds=deviation,
        slow=slow,
        waited_for=waited_for,
        waits_seconds=waits,
    )


def _cause(excess: float, data: float, stall: float) -> str:
    if data >= excess / 2:
        return "waiting for batches"
    return "waiting for its checkpoints" if stall >= excess / 2 else "its own work"


def _waits(ranks: Sequence[RankMeans]) -> tuple[int | None, dict[int, float]]:
    """Return the rank that the others wait for, whose barrier time is the gradient exchange, and the waits."""
    barriers = {rank.rank: rank.barrier_seconds or 0.0 for rank in ranks}
    last = min(barriers, key=barriers.__getitem__)
    waits = {rank: seconds - barriers[last] for rank, seconds in barriers.items()}
    usual = median_low(rank.iteration_seconds for rank in ranks)
    noted = median_low(waits[rank] for rank in waits if rank != last) > LEAST_SHARE * usual
    return (last if noted else None), waits
