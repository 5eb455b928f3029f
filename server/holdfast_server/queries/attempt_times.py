"""The time of many jobs in a window by attempt, so that it can be multiplied by the ranks of each attempt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy.orm import Session

from holdfast_server import models
from holdfast_server.queries.goodput import (
    StandingIterations,
    end_of_attempt,
    interruptions_of_jobs,
    mean_overheads,
    spans_of_jobs,
    window_bounds,
)
from holdfast_server.queries.time_buckets import AttemptTime, Interruption, Span, Timesheet, timesheet
from holdfast_server.records.ancestry import Ancestry, lineage_starts
from holdfast_server.records.failures import AttemptHistory, attempts_of_jobs


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedAttempt:
    """One attempt, from its start until the next one, within a window."""

    attempt: models.AttemptRecord
    following: models.AttemptRecord | None
    ended_at: float
    """When it ended or last reported; the end of the window while it runs."""
    sheet: Timesheet
    """Its time, and the time after it without an attempt."""
    spans: Sequence[Span]
    """Its iterations in the window, oldest first."""


def attempt_times(
    session: Session, jobs: Sequence[models.JobRecord], begins_at: float, *, now: float, most_spans: int
) -> dict[str, list[TimedAttempt]]:
    """Return the attempts of many jobs in a window, oldest first, in a fixed number of statements.

    Args:
        most_spans: about the most spans of work that are read of each job; fewer ones are longer.
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
    spans = spans_of_jobs(session, standing, begins_at, now, most=most_spans)
    overheads = mean_overheads(session, names, begins_at)
    interruptions = interruptions_of_jobs(session, names, begins_at, now=now)
    return {
        job.name: _timed(
            job, attempts[job.name], spans.get(job.name, []), interruptions.get(job.name, []), begins_at,
            overheads.get(job.name, 0.0), now=now,
        )
        for job in jobs if job.name in attempts
    }  # fmt: skip


def _timed(
    job: models.JobRecord,
    attempts: Sequence[AttemptHistory],
    spans: Sequence[Span],
    interruptions: Sequence[Interruption],
    begins_at: float,
    overhead: float,
    *,
    now: float,
) -> list[TimedAttempt]:
    begins_at, ends_at = window_bounds(attempts, begins_at, now=now)
    attempts = sorted(attempts, key=lambda one: one.attempt.started_at)
    by_uid: dict[str, list[Span]] = {}
    for span in sorted(spans, key=lambda span: span.begins_at):
        by_uid.setdefault(span.uid, []).append(span)
    timed: list[TimedAttempt] = []
    reached = begins_at
    for number, one in enumerate(attempts):
        following = attempts[number + 1].attempt if number + 1 < len(attempts) else None
        until = ends_at if following is None else min(max(reached, following.started_at), ends_at)
        own, ended_at = by_uid.get(one.attempt.uid, []), end_of_attempt(job, one, now=now)
        time = AttemptTime(
            uid=one.attempt.uid, started_at=one.attempt.started_at, ended_at=ended_at,
            trained_before=one.attempt.started_at < begins_at and _trained_before(one.attempt, own),
        )  # fmt: skip
        sheet = timesheet([time], own, interruptions, begins_at=reached, ends_at=until, overhead=overhead)
        timed.append(
            TimedAttempt(
                attempt=one.attempt, following=following, ended_at=min(ended_at, until), sheet=sheet, spans=own
            )
        )
        reached = until
    return timed


def _trained_before(attempt: models.AttemptRecord, spans: Sequence[Span]) -> bool:
    """Return whether an attempt from before the window finished iterations before its first span there."""
    return spans[0].first_iteration > attempt.iteration + 1 if spans else attempt.iterations > 0
