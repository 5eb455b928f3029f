"""What rules can look at. Pure functions from the facts of a job to a verdict."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

from holdfast.pacing.policy import duration, plural
from holdfast.protocol.administration import LimitUnit, Severity
from holdfast_server.alerts.facts import Facts

SEVERITIES: tuple[Severity, ...] = get_args(Severity)

CLEAR = 0.9
"""A figure has to come back by a tenth of its limit before an alert may end: one at the limit does not flap."""
STUCK_ITERATIONS = 5
"""A job whose iterations take minutes is not stuck because it trains."""


@dataclass(frozen=True, slots=True)
class Verdict:
    broken: bool
    """The rule is."""
    message: str
    value: float | None = None
    subject: str = ""
    clear: bool = True
    """Where it is not broken: by enough that an alert may end."""


FINE = Verdict(False, "")
Judge = Callable[[Facts, float], Verdict | None]
"""None: it cannot be told now, and what was so before stands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Something that a rule can look at."""

    name: str
    title: str
    meaning: str
    """Of the limit, in a sentence."""
    unit: LimitUnit
    """Of the limit; empty: it has none."""
    limit: float = 0.0
    for_seconds: float = 0.0
    severity: Severity = "warning"
    built_in: bool = True
    """There is a rule of it in every project."""
    judge: Judge


def _of_a_running_job(judge: Judge) -> Judge:
    """What is said of a job that trains: when it has ended all is well, while it is silent nobody knows."""

    def judged(facts: Facts, limit: float) -> Verdict | None:
        if facts.status in ("finished", "stopped", "failed"):
            return FINE
        return None if facts.status == "silent" else judge(facts, limit)

    return judged


def _above(value: float | None, limit: float, message: str) -> Verdict | None:
    if value is None:
        return None
    return Verdict(value > limit, message, value, clear=value <= limit * CLEAR)


def _no_progress(facts: Facts, limit: float) -> Verdict | None:
    allowed = max(limit, STUCK_ITERATIONS * facts.longest_iteration_seconds)
    return _above(facts.stuck_seconds, allowed, f"no new iteration for more than {duration(allowed)}")


def _exposure_iterations(facts: Facts, limit: float) -> Verdict | None:
    told = f"more than {plural(round(limit))} would be lost if it died now"
    return _above(facts.exposure_iterations, limit, told)


def _exposure_gpu_hours(facts: Facts, limit: float) -> Verdict | None:
    told = f"more than {limit:,.4g} GPU-hours of work would be lost if it died now"
    return _above(facts.exposure_gpu_hours, limit, told)


def _overhead(facts: Facts, limit: float) -> Verdict | None:
    if facts.measured_overhead is None or not facts.budget:
        return None
    told = f"checkpoints cost more than {limit:.3g} times the budget of {facts.budget * 100:.3g}%"
    return _above(facts.measured_overhead / facts.budget, limit, told)


def _persist_failing(facts: Facts, limit: float) -> Verdict | None:
    if facts.failing is None:
        return FINE
    count = facts.failing.count
    told = f"{count} checkpoint{'s' * (count != 1)} in a row came to nothing: {facts.failing.reason}"
    return Verdict(count >= limit, told, count)


def _damaged(facts: Facts, limit: float) -> Verdict | None:
    count = len(facts.damaged)
    if not count:
        return FINE
    more = f" and {count - 1} more" if count > 1 else ""
    return Verdict(True, f"checkpoint {facts.damaged[0]}{more} cannot be read back whole", count)


def _durable_age(facts: Facts, limit: float) -> Verdict | None:
    return _above(
        facts.durable_age_seconds, limit, f"no checkpoint became durable for more than {duration(limit)}"
    )


def _loss_nan(facts: Facts, limit: float) -> Verdict | None:
    if facts.loss is None:
        return None
    return Verdict(not math.isfinite(facts.loss), f"the loss is {facts.loss}")


def _disk_filling(facts: Facts, limit: float) -> Verdict | None:
    if facts.room_checkpoints is None or facts.store_free_bytes is None:
        return None
    free = f"{facts.store_free_bytes / 1e9:,.3g} GB"
    told = f"{free} were free in the store at the last checkpoint, less than {limit:.3g} more of them take"
    room = facts.room_checkpoints
    return Verdict(room < limit, told, room, clear=room >= limit / CLEAR)


def _silent(facts: Facts, limit: float) -> Verdict | None:
    if facts.status != "silent":
        return FINE
    told = f"nothing heard of it for more than {duration(limit)}: a process or a network that died without a word"
    return Verdict(facts.silent_seconds > limit, told, facts.silent_seconds)


def _failed(facts: Facts, limit: float) -> Verdict | None:
    return Verdict(facts.status == "failed", f"it ended with {facts.status_reason}", subject=facts.attempt_uid)


def _restored(facts: Facts, limit: float) -> Verdict | None:
    order = facts.order
    if order is None or order.state != "restored" or order.ago_seconds > limit:
        return FINE
    took = "" if order.seconds is None else f" in {duration(order.seconds)}"
    return Verdict(True, f"went back to iteration {order.iteration:,}{took}", subject=order.id)


def _restore_failed(facts: Facts, limit: float) -> Verdict | None:
    order = facts.order
    if order is None or order.state not in ("failed", "expired") or order.ago_seconds > limit:
        return FINE
    told = f"did not go back to iteration {order.iteration:,}: {order.reason or order.state}"
    return Verdict(True, told, subject=order.id)


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind(
            name="no_progress",
            title="No progress",
            meaning="Longest time without a new iteration; or five of its longest iterations, where that is more",
            unit="seconds",
            limit=600,
            severity="critical",
            judge=_of_a_running_job(_no_progress),
        ),
        Kind(
            name="silent",
            title="Agent silent",
            meaning="Longest time without a word of a job that has not said that it ends",
            unit="seconds",
            limit=120,
            severity="critical",
            judge=_silent,
        ),
        Kind(
            name="job_failed",
            title="Job failed",
            meaning="An exception ended it",
            unit="",
            severity="critical",
            judge=_failed,
        ),
        Kind(
            name="persist_failing",
            title="Checkpoints failing",
            meaning="How many in a row may come to nothing, this one included",
            unit="checkpoints",
            limit=2,
            severity="critical",
            judge=_of_a_running_job(_persist_failing),
        ),
        Kind(
            name="checkpoint_damaged",
            title="Checkpoint damaged",
            meaning="One in the store was found damaged",
            unit="",
            severity="critical",
            judge=_damaged,
        ),
        Kind(
            name="durable_age",
            title="Last durable checkpoint too old",
            meaning="Longest time since the last checkpoint became durable, or since the start",
            unit="seconds",
            limit=7200,
            judge=_of_a_running_job(_durable_age),
        ),
        Kind(
            name="exposure_gpu_hours",
            title="Too much at risk, in GPU-hours",
            meaning="Most GPU-hours that may be lost if the job dies now, of all ranks together",
            unit="gpu_hours",
            limit=100,
            for_seconds=60,
            judge=_of_a_running_job(_exposure_gpu_hours),
        ),
        Kind(
            name="exposure_iterations",
            title="Too much at risk, in iterations",
            meaning="Most iterations that may be lost if the job dies now",
            unit="iterations",
            limit=1000,
            for_seconds=60,
            built_in=False,
            judge=_of_a_running_job(_exposure_iterations),
        ),
        Kind(
            name="overhead",
            title="Overhead over budget",
            meaning="Measured overhead, as a multiple of the budget in force",
            unit="times_budget",
            limit=1.2,
            for_seconds=600,
            judge=_of_a_running_job(_overhead),
        ),
        Kind(
            name="disk_filling",
            title="Store filling up",
            meaning="Room in the store for fewer further checkpoints than this",
            unit="checkpoints",
            limit=3,
            judge=_of_a_running_job(_disk_filling),
        ),
        Kind(
            name="loss_nan",
            title="Loss not finite",
            meaning="The newest loss is nan or infinite",
            unit="",
            for_seconds=60,
            judge=_of_a_running_job(_loss_nan),
        ),
        Kind(
            name="restore_failed",
            title="Restore failed",
            meaning="How long a restore that failed or expired is told of",
            unit="seconds",
            limit=3600,
            severity="critical",
            judge=_restore_failed,
        ),
        Kind(
            name="restore_finished",
            title="Restore finished",
            meaning="How long a restore that came to its end is told of",
            unit="seconds",
            limit=600,
            severity="info",
            judge=_restored,
        ),
    )
}
