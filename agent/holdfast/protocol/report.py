"""The report on a job or the fleet over some hours: what failed, what it cost, what was done, what to decide."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from holdfast.protocol.analyses import Bucket
from holdfast.protocol.verdicts import Verdict
from holdfast.units import duration

ActorKind = Literal["person", "policy", "supervisor", "alert", "server"]
"""`person`: an account or its key. `policy`: the rule of a job that restores by itself."""


class ReportDecision(Struct, kw_only=True, frozen=True):
    """A job that has a problem now."""

    job: str
    project: str
    owner: str
    world_size: int
    verdict: Verdict


class ReportFailure(Struct, kw_only=True, frozen=True):
    """Failures of one job with the same cause, and their total cost."""

    job: str
    project: str
    cause: str
    count: int
    first_at: float
    at: float
    """End of the last of them."""
    iteration: int
    """Last iteration before the last of them."""
    host: str
    lost_iterations: int
    """Iterations that were discarded, because no checkpoint held them."""
    lost_seconds: float
    """Time of these iterations."""
    down_seconds: float
    """Time from each failure to the next finished iteration, or until now."""
    gpu_hours: float
    """Both times multiplied by the number of ranks."""
    continued_from: int | None
    """Iteration from which training continued after the last of them; `None`: it has not continued."""
    continued_by: str
    """`holdfast run on gpu-17`, or empty if something else started the script."""


class ReportAction(Struct, kw_only=True, frozen=True):
    """An action on a job."""

    at: float
    job: str
    project: str
    actor: str
    kind: ActorKind
    text: str


class ReportProject(Struct, kw_only=True, frozen=True):
    """How the jobs of a project spent their time, in GPU-hours: time multiplied by the number of ranks."""

    project: str
    jobs: int
    failures: int
    iterations: int
    """Iterations that were not discarded."""
    lost_iterations: int
    """Iterations that failures and restores discarded."""
    gpu_hours: float
    buckets: dict[Bucket, float]
    """GPU-hours by category; they add up to `gpu_hours`."""


class Report(Struct, kw_only=True, frozen=True):
    """What happened in a window. Figures are measured; lists are cut to the most important rows."""

    job: str | None
    """The job of the report; `None`: the fleet, or a project."""
    project: str | None
    begins_at: float
    ends_at: float
    jobs: int
    """Number of jobs that reported in the window or have an open alert."""
    measured_jobs: int
    """Number of these, those with the most ranks, whose failures and time the report holds."""
    examined_jobs: int
    """Number of these, those that need attention first, among which the decisions are."""
    decisions: list[ReportDecision]
    """Jobs that have a problem now, the most severe first."""
    failures: list[ReportFailure]
    """By job and cause, the costliest first."""
    failures_total: int
    """Number of failures in the window, on all rows."""
    failures_gpu_hours: float
    actions: list[ReportAction]
    """Newest first."""
    actions_total: int
    alerts: int
    """Number of alerts that fired in the window."""
    projects: list[ReportProject]
    """The largest first."""

    @property
    def gpu_hours(self) -> float:
        return sum(row.gpu_hours for row in self.projects)

    @property
    def productive(self) -> float | None:
        """Share of the GPU-hours that advanced training; `None` without any."""
        total = self.gpu_hours
        return sum(row.buckets["productive"] for row in self.projects) / total if total else None

    @property
    def headline(self) -> str:
        """The report in one sentence."""
        parts = [self._decide()]
        failed = self.failures_total
        cost = gpu_hours(self.failures_gpu_hours)
        parts.append(f"{_plural(failed, 'failure')} cost {cost}" if failed else "no failure")
        if self.productive is not None:
            parts.append(f"{self.productive * 100:.1f} % of {gpu_hours(self.gpu_hours)} productive")
        return "; ".join(parts)

    def _decide(self) -> str:
        waiting = len(self.decisions)
        if self.job is not None:
            return "Needs a decision" if waiting else "Nothing to decide"
        jobs = _plural(self.jobs, "job")
        return (
            f"{waiting:,} of {jobs} need{'s' * (waiting == 1)} a decision"
            if waiting
            else f"{jobs}, nothing to decide"
        )

    @property
    def omissions(self) -> list[str]:
        """Description of the rows that the limits of a report leave out."""
        left = []
        if self.measured_jobs < self.jobs:
            left.append(
                f"Failures and time are those of the {_plural(self.measured_jobs, 'job')} with the most ranks"
            )
        if self.examined_jobs < self.jobs:
            left.append(
                f"Decisions are those of the {_plural(self.examined_jobs, 'job')} that need attention first"
            )
        return left


def gpu_hours(value: float) -> str:
    """Format GPU-hours with up to three digits: `0.07 GPU-hours`."""
    figure = (
        f"{value:,.0f}" if value >= 100 else f"{value:.3g}" if value >= 0.01 or value == 0 else "less than 0.01"
    )
    return f"{figure} GPU-hour{'s' * (figure != '1')}"


def cost_text(row: ReportFailure) -> str:
    """Return the cost of failures: `lost 12 iterations (4 min), down for 2 min`."""
    parts = ["lost no iteration"]
    if row.lost_iterations:
        parts = [f"lost {_plural(row.lost_iterations, 'iteration')} ({duration(row.lost_seconds)})"]
    if (down := round(row.down_seconds)) > 0:
        parts.append(f"down for {duration(down)}")
    return ", ".join(parts)


def outcome_text(row: ReportFailure) -> str:
    """Return how the job continued after failures."""
    if row.continued_from is None:
        return "not training again"
    by = f", by {row.continued_by}" if row.continued_by else ""
    return f"continued from {row.continued_from:,}{by}"


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"
