"""The verdict on a job: its condition in one sentence. Pure functions, except the queries at the end.

`VERDICTS` lists all causes in the order of their severity; the first one that applies is the verdict.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sqlalchemy import or_, select
from sqlalchemy.orm import Session

from holdfast.protocol.jobs import JobSummary
from holdfast.protocol.verdicts import Verdict, VerdictCause, VerdictLevel
from holdfast.units import duration
from holdfast_server import models
from holdfast_server.db import named_jobs
from holdfast_server.queries.ranks import RankFindings

MAX_TEXT = 300
LASTING = ("checkpoint_damaged", "restore_failed")
"""Kinds of alerts that concern a job that has ended."""
SLOW = ("throughput_drop", "iteration_time", "goodput_low")
"""Kinds of alerts that waiting for data or for a slow rank explains: the verdict then names that."""
LATE_INTERVALS = 2
"""Age, in intervals, from which the newest checkpoint is late."""
LATE_SECONDS = 60.0
"""Age below which no checkpoint makes a job unprotected."""
DATA_SHARE = 0.3
"""Share of the time from which waiting for data limits a job."""
SLOWER = 0.1
"""How much longer than the median a rank takes that slows the others down."""
SMALL_GPU_HOURS = 0.01
"""Less is given as time of training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAlert:
    """An alert that is open and not silenced."""

    kind: str
    severity: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictFacts:
    """What a verdict follows from."""

    job: JobSummary
    now: float
    exception: str = ""
    """The line of the output of the last attempt that names its exception."""
    ended_seconds: float | None = None
    """Time since the last attempt ended; `None` if it has not, or not reported it."""
    alerts: Sequence[OpenAlert] = ()
    ranks: RankFindings | None = None
    """Waits for data and for a slow rank, of a job that trains."""


_Sentence = tuple[VerdictLevel, str, str]
"""Level, text and next step."""
_Rule = Callable[[VerdictFacts], _Sentence | None]


def verdict(facts: VerdictFacts) -> Verdict:
    for cause, rule in VERDICTS.items():
        if (sentence := rule(facts)) is not None:
            level, text, step = sentence
            # agents report parts of it: a line of their own would read as another verdict
            line = " ".join("".join(each if each.isprintable() else " " for each in text).split())
            line = line if len(line) <= MAX_TEXT else line[: MAX_TEXT - 1] + "…"
            return Verdict(cause=cause, level=level, text=line, next_step=step)
    raise AssertionError("the last causes cover every status")


def is_late(job: JobSummary, now: float) -> bool:
    """Return whether a running job has had no durable checkpoint for more than `LATE_INTERVALS` intervals."""
    every, is_paused = _interval_seconds(job), job.desired.paused or job.training_paused_at is not None
    if not job.alive or job.status == "restarting" or every is None or is_paused:
        return False
    return _unprotected_seconds(job, now) > LATE_INTERVALS * every


# ---- the causes -----------------------------------------------------------------------------------


def _failed(facts: VerdictFacts) -> _Sentence | None:
    job, supervisor = facts.job, facts.job.supervisor
    if job.status != "failed":
        return None
    why = job.status_reason
    if facts.exception and facts.exception not in why:
        is_said = re.search(rf"\biteration {job.iteration}\b", facts.exception)
        why = facts.exception if is_said else f"{facts.exception} at iteration {job.iteration:,}"
        if supervisor is not None and supervisor.state == "gave_up" and supervisor.start:
            why += f"; gave up after {_plural(supervisor.start, 'start')}"
    if supervisor is not None and supervisor.waits:
        step = f"Fix the cause, then restore a checkpoint: holdfast run on {supervisor.host} waits for it"
    else:
        step = f"Fix the cause, then start the script again{_resumes(job)}"
    return "critical", f"Failed{_ago(facts)}: {why}", step


def _silent(facts: VerdictFacts) -> _Sentence | None:
    job = facts.job
    if job.status != "silent":
        return None
    last = f"last report from {job.host}" if job.host else "no report from the agent"
    text = f"Silent for {_age(job.last_contact_seconds)}: {last}; {_cost(job, 'a crash has cost')}"
    step = f"If its process has ended, start the script again{_resumes(job)}; otherwise check its network"
    return "critical", text, step


def _restoring(facts: VerdictFacts) -> _Sentence | None:
    order = facts.job.open_order
    if order is None or not facts.job.alive:
        return None
    by = f", requested by {order.who}" if order.who else ""
    return "info", f"Restoring iteration {order.iteration:,}: {order.state}{by}", ""


def _failing(facts: VerdictFacts) -> _Sentence | None:
    job, failing = facts.job, facts.job.failing
    if failing is None or not job.alive or job.status == "restarting":
        return None
    count = _plural(failing.count, "checkpoint")
    text = f"Not protected for {_age(_unprotected_seconds(job, facts.now))}: {count} failed, {failing.reason}"
    level: VerdictLevel = "critical" if failing.count > 1 else "warning"
    return level, text, "Fix the store; training continues, and the next checkpoint tries again"


def _alert(kinds: dict[str, tuple[str, str]]) -> _Rule:
    """Return the rule for alerts of some kinds, each with its first words and its next step."""

    def rule(facts: VerdictFacts) -> _Sentence | None:
        for alert in facts.alerts:
            if alert.kind in SLOW and alert.severity != "critical" and (_data(facts) or _straggler(facts)):
                continue
            if alert.kind in kinds and (alert.kind in LASTING or not facts.job.has_ended):
                words, step = kinds[alert.kind]
                level: VerdictLevel = "critical" if alert.severity == "critical" else "warning"
                return level, f"{words}: {alert.message}", step
        return None

    return rule


def _loss(facts: VerdictFacts) -> _Sentence | None:
    job = facts.job
    if job.status not in ("running", "paused") or job.loss is None or math.isfinite(job.loss):
        return None
    message = next(
        (alert.message for alert in facts.alerts if alert.kind == "loss_nan"), f"the loss is {job.loss}"
    )
    step = "Restore a checkpoint from before it, with a change: the same iterations give the same losses"
    return "critical", f"Loss not finite: {message}", step


def _restarting(facts: VerdictFacts) -> _Sentence | None:
    job, supervisor = facts.job, facts.job.supervisor
    if job.status != "restarting":
        return None
    if supervisor is None:
        return "warning", f"Restarting: {job.status_reason or 'no iteration is finished yet'}", ""
    place = f" on {supervisor.host}" if supervisor.host else ""
    if not supervisor.failed:
        return "info", f"Restarting{place}: {supervisor.reason}", ""
    start = f", start {supervisor.start} of {supervisor.limit}" if supervisor.limit else ""
    step = f"Nothing to do yet: holdfast run starts the script again{_resumes(job)}"
    return "warning", f"Restarting{place}{start} ({facts.exception or supervisor.reason})", step


def _late(facts: VerdictFacts) -> _Sentence | None:
    job, seconds = facts.job, _unprotected_seconds(facts.job, facts.now)
    if job.status != "running" or seconds < LATE_SECONDS or not is_late(job, facts.now):
        return None
    text = (
        f"Not protected for {_age(seconds)}: no checkpoint became durable, "
        f"one is due every {_age(_interval_seconds(job) or 0.0)}"
    )
    return "warning", text, "Check under Last durable and Checkpoints whether the store is slow"


def _paused(facts: VerdictFacts) -> _Sentence | None:
    job = facts.job
    if job.training_paused_at is not None and job.status == "paused":
        since = _age(facts.now - job.training_paused_at)
        text = f"Training paused for {since} by {job.training_paused_by}; {_cost(job)}"
        return "warning", text, "Continue training"
    if not job.desired.paused or not job.alive:
        return None
    return "warning", f"Checkpoints paused; {_cost(job)}", "Resume checkpoints"


def _data(facts: VerdictFacts) -> _Sentence | None:
    share = facts.ranks.data_share if facts.ranks else None
    if facts.job.status != "running" or share is None or share < DATA_SHARE:
        return None
    return "warning", f"Waiting for data {share * 100:.0f} % of the time", "Profile data loading on the job's page"


def _straggler(facts: VerdictFacts) -> _Sentence | None:
    found = facts.ranks
    if facts.job.status != "running" or found is None or found.slowest is None or found.slower < SLOWER:
        return None
    text = (
        f"Rank {found.slowest} slows all ranks: it takes {found.slower * 100:.0f} % longer because of {found.why}"
    )
    return "warning", text, f"See rank {found.slowest} under Ranks: its host, its GPU and its data"


def _starting(facts: VerdictFacts) -> _Sentence | None:
    if facts.job.status != "starting":
        return None
    return "info", f"Starting: {facts.job.status_reason}", ""


def _unprotected(facts: VerdictFacts) -> _Sentence | None:
    job = facts.job
    if not job.alive or job.last_durable is not None:
        return None
    return "info", f"No checkpoint yet; {_cost(job)}", ""


def _healthy(facts: VerdictFacts) -> _Sentence | None:
    job = facts.job
    if not job.alive or job.last_durable is None:
        return None
    age = max(0.0, facts.now - job.last_durable.at)
    return "good", f"Healthy: newest checkpoint {_age(age)} old; {_cost(job)}", ""


def _stopped(facts: VerdictFacts) -> _Sentence | None:
    if facts.job.status != "stopped":
        return None
    step = f"Start the script again to continue{_resumes(facts.job)}"
    return "ended", f"Stopped{_ago(facts)}: {facts.job.status_reason}", step


def _finished(facts: VerdictFacts) -> _Sentence | None:
    last = facts.job.last_durable
    kept = f"; newest checkpoint at {last.iteration:,}" if last else "; no checkpoint is durable"
    return "ended", f"Finished{_ago(facts)} at iteration {facts.job.iteration:,}{kept}", ""


VERDICTS: dict[VerdictCause, _Rule] = {
    "failed": _failed,
    "silent": _silent,
    "restarting": _restarting,
    "restoring": _restoring,
    "failing": _failing,
    "stuck": _alert(
        {"no_progress": ("Stuck", "Read the output of the running attempt, and restart it if it hangs")}
    ),
    "loss": _loss,
    "damaged": _alert(
        {
            "checkpoint_damaged": ("Damaged checkpoint", "Verify the others, and take a new checkpoint"),
        }
    ),
    "late": _late,
    "alert": _alert(
        {
            "restore_failed": ("Restore failed", "Read the reason under Restores, then request it again"),
            "durable_age": ("Not protected", "Check whether checkpoints are paused or the interval is too long"),
            "unsaved_gpu_hours": ("Much unsaved work", "Take a checkpoint now, or shorten the interval"),
            "unsaved_iterations": ("Much unsaved work", "Take a checkpoint now, or shorten the interval"),
            "disk_filling": ("Store filling up", "Free space in the store, or keep fewer checkpoints"),
            "loss_spike": ("Loss spike", "Watch the loss; restore a checkpoint from before it if it stays high"),
            "throughput_drop": (
                "Slower than usual",
                "Check Ranks and Attempts for another host, fewer ranks, slow data or a slow rank",
            ),
            "iteration_time": (
                "Slower than usual",
                "See what changed: hosts and ranks under Attempts, slow data or a slow rank",
            ),
            "goodput_low": ("Low goodput", "See where the time went under Goodput"),
            "overhead": ("Over budget", "Compare intervals and budgets under Plan"),
        }
    ),
    "paused": _paused,
    "data": _data,
    "straggler": _straggler,
    "starting": _starting,
    "unprotected": _unprotected,
    "healthy": _healthy,
    "stopped": _stopped,
    "finished": _finished,
}
"""All causes, the most severe first."""


# ---- parts of sentences ---------------------------------------------------------------------------


def _age(seconds: float) -> str:
    return duration(float(round(max(0.0, seconds))))


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"


def _ago(facts: VerdictFacts) -> str:
    return "" if facts.ended_seconds is None else f" {_age(facts.ended_seconds)} ago"


def _cost(job: JobSummary, words: str = "a crash now costs") -> str:
    hours, seconds = job.unsaved_gpu_hours, job.unsaved_seconds
    if not job.unsaved_iterations:
        return f"{words} nothing"
    if hours is not None and hours >= SMALL_GPU_HOURS and math.isfinite(hours):
        return f"{words} {hours:.2g} GPU-hours" if hours < 100 else f"{words} {hours:,.0f} GPU-hours"
    if seconds is not None and math.isfinite(seconds):
        return f"{words} {_age(seconds) if seconds >= 1 else 'less than 1 s'} of training"
    return f"{words} {_plural(job.unsaved_iterations, 'iteration')}"


def _resumes(job: JobSummary) -> str:
    return f": it resumes from {job.last_durable.iteration:,}" if job.last_durable else ""


def _interval_seconds(job: JobSummary) -> float | None:
    if job.interval_seconds is not None or job.interval is None or not job.iterations_per_second:
        return job.interval_seconds
    return job.interval / job.iterations_per_second


def _unprotected_seconds(job: JobSummary, now: float) -> float:
    since = job.last_durable.at if job.last_durable else 0.0
    return max(0.0, now - max(since, job.started_at or 0.0)) if since or job.started_at else 0.0


# ---- queries --------------------------------------------------------------------------------------

_ALERTS = select(
    models.AlertRecord.job, models.AlertRecord.kind, models.AlertRecord.severity, models.AlertRecord.message,
    models.AlertRecord.silenced_until,
).where(
    models.AlertRecord.job.in_(named_jobs()),
    models.AlertRecord.fired_at.is_not(None),
    models.AlertRecord.resolved_at.is_(None),
    or_(models.AlertRecord.severity == "critical", models.AlertRecord.severity == "warning"),
)  # fmt: skip


def open_alerts(session: Session, jobs: Sequence[str], *, now: float) -> dict[str, list[OpenAlert]]:
    """Return the alerts by job that are open and not silenced, the critical ones first."""
    found: dict[str, list[OpenAlert]] = {}
    for job, kind, severity, message, silenced_until in session.execute(_ALERTS, {"jobs": list(jobs)}):
        if silenced_until is None or silenced_until <= now:
            found.setdefault(job, []).append(OpenAlert(kind=kind, severity=severity, message=message))
    for alerts in found.values():
        alerts.sort(key=lambda alert: alert.severity != "critical")
    return found
