"""The kinds of alert rules: pure functions from the facts of a job to a result."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

from holdfast.protocol.administration import LimitUnit, Severity
from holdfast.units import duration, format_bytes, format_iterations
from holdfast_server.alerts.facts import JobFacts
from holdfast_server.alerts.loss_spikes import NEWEST_LOSSES, OpenSpike
from holdfast_server.records.last_good import ENDED

SEVERITIES: tuple[Severity, ...] = get_args(Severity)

CLEAR = 0.9
"""Fraction of the limit that a value must fall to before an alert may end: a value at the limit does not flap."""
LASTING = f"; it is still high {NEWEST_LOSSES} iterations later"
"""End of the message about a spike that lasts: only then is it sent."""
LEAST_SECONDS = 0.001
"""Time of an iteration below which a difference is the noise of clocks and schedulers, whatever its share."""
STUCK_ITERATIONS = 5
"""A job is stuck only after this many of its longest iterations: some iterations take minutes."""


@dataclass(frozen=True, slots=True)
class RuleResult:
    broken: bool
    message: str
    """What was found, with the measured value."""
    value: float | None = None
    subject: str = ""
    """The attempt or restore that the result is about: another one begins another alert."""
    iteration: int | None = None
    """Iteration at which the trouble began, if the result is about one, on `lineage`."""
    lineage: int | None = None
    clear: bool = True
    """Whether a rule that is not broken is so by enough that an alert may end."""
    why: str = "back to normal"
    """Why an alert ends if the rule is not broken."""
    limit: str = ""
    """The limit that the value exceeds, in words."""
    detail: str = ""
    """What follows the value and its limit."""
    is_announced: bool = True
    """Whether messages are sent: not yet about a spike that may be over in a moment."""

    def text(self, held_seconds: float = 0.0) -> str:
        """Return the message with value and limit, in one line without control characters.

        Args:
            held_seconds: how long the condition has held, of a rule that demands a time.
        """
        held = f" for {_duration(held_seconds)}" if held_seconds else ""
        limit = f" (limit {self.limit})" if self.limit else ""
        # agents report parts of it: a line of their own would read as another alert
        text = f"{self.message}{held}{limit}{self.detail}"
        return " ".join("".join(each if each.isprintable() else " " for each in text).split())

    @property
    def end(self) -> str:
        """Why an alert ends, with the value that it ends at."""
        return f"{self.why}: {self.text()}" if self.limit else self.why


OK = RuleResult(False, "")


def _on(facts: JobFacts) -> str:
    return f" on {facts.host}" if facts.host else ""


Judge = Callable[[JobFacts, float], RuleResult | None]
"""Compares facts with a limit; `None` if they do not suffice: an open alert then stays as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleKind:
    name: str
    title: str
    meaning: str
    """The limit, explained in a phrase."""
    unit: LimitUnit
    """Unit of the limit; empty if there is none."""
    limit: float
    window: int
    """Number of iterations that a value is compared with; 0: the kind has no window."""
    for_seconds: float
    severity: Severity
    built_in: bool
    """Whether every project has a rule of this kind."""
    judge: Judge
    analyzed: bool = False
    """Whether it needs an analysis of the last minutes, which is made less often."""


KINDS: dict[str, RuleKind] = {}
"""All kinds by name, in the order in which pages list them."""


def _kind(
    name: str,
    title: str,
    meaning: str,
    *,
    unit: LimitUnit = "",
    limit: float = 0.0,
    window: int = 0,
    for_seconds: float = 0.0,
    severity: Severity = "warning",
    built_in: bool = True,
    while_training: bool = False,
    analyzed: bool = False,
) -> Callable[[Judge], Judge]:
    """Register a kind.

    `while_training` limits it to jobs that train: it does not apply to a job that has ended, and its result for a
    silent or paused job is unknown.
    """

    def register(judge: Judge) -> Judge:
        def judge_training(facts: JobFacts, limit: float) -> RuleResult | None:
            if facts.status in ("finished", "stopped", "failed"):
                return RuleResult(False, "", why=ENDED)
            return None if facts.status == "silent" or facts.is_paused else judge(facts, limit)

        KINDS[name] = RuleKind(
            name=name, title=title, meaning=meaning, unit=unit, limit=limit, window=window,
            for_seconds=for_seconds, severity=severity, built_in=built_in,
            judge=judge_training if while_training else judge, analyzed=analyzed,
        )  # fmt: skip
        return judge

    return register


def _duration(seconds: float) -> str:
    """Format for a message that is written again when it changes: in whole minutes from 2 minutes on."""
    return duration(round(seconds) if seconds < 120 else seconds // 60 * 60)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _above(value: float | None, limit: float, message: str, limit_text: str) -> RuleResult | None:
    if value is None:
        return None
    return RuleResult(value > limit, message, value, clear=value <= limit * CLEAR, limit=limit_text)


def _above_floor(value: float, limit: float, message: str, seconds: float) -> RuleResult:
    """Compare a share in percent with its limit; what is less than `LEAST_SECONDS` an iteration breaks no rule."""
    broken = value > limit and seconds >= LEAST_SECONDS
    clear = value <= limit * CLEAR or seconds < LEAST_SECONDS * CLEAR
    return RuleResult(broken, message, value, clear=clear, limit=f"{limit:g} %")


@_kind(
    "no_progress", "No progress",
    "Longest time without a new iteration, or five times the longest iteration if that is more",
    unit="seconds", limit=600, severity="critical", while_training=True,
)  # fmt: skip
def _no_progress(facts: JobFacts, limit: float) -> RuleResult | None:
    longest, stuck = facts.longest_iteration_seconds, facts.stuck_seconds
    allowed = max(limit, STUCK_ITERATIONS * longest)
    slow = f", {STUCK_ITERATIONS} times the longest iteration" if allowed > limit else ""
    message = f"no new iteration{_on(facts)} for {_duration(stuck or 0)}"
    return _above(stuck, allowed, message, _duration(allowed) + slow)


@_kind(
    "silent", "Job silent", "Longest time without a report from a job that has not ended",
    unit="seconds", limit=120, severity="critical",
)  # fmt: skip
def _silent(facts: JobFacts, limit: float) -> RuleResult | None:
    silent = facts.silent_seconds
    if facts.status != "silent":
        return OK
    return RuleResult(
        silent > limit, f"no report for {_duration(silent)}", silent, limit=_duration(limit),
        detail=f": the process{_on(facts)} or its network may be down",
    )  # fmt: skip


@_kind("job_failed", "Job failed", "The job ended with an exception", severity="critical")
def _job_failed(facts: JobFacts, limit: float) -> RuleResult | None:
    if facts.status == "restarting":
        return None  # the next start decides whether an open alert ends
    message = f"ended{_on(facts)} with {facts.status_reason}" + (f": {facts.exception}" if facts.exception else "")
    if facts.remedy:
        place = "" if facts.host in facts.remedy else _on(facts)
        message = f"{facts.status_reason}{place}. {facts.remedy}"
    return RuleResult(facts.status == "failed", message)


@_kind(
    "persist_failing", "Checkpoints failing", "Number of consecutive failed checkpoints",
    unit="checkpoints", limit=2, severity="critical", while_training=True,
)  # fmt: skip
def _persist_failing(facts: JobFacts, limit: float) -> RuleResult | None:
    if facts.failing is None:
        return OK
    count = facts.failing.count
    message = f"{count} checkpoint{'s' * (count != 1)} in a row failed{_on(facts)}"
    return RuleResult(count >= limit, message, count, limit=f"{limit:g}", detail=f": {facts.failing.reason}")


@_kind(
    "checkpoint_damaged", "Checkpoint damaged", "A checkpoint in the store was found damaged", severity="critical"
)
def _checkpoint_damaged(facts: JobFacts, limit: float) -> RuleResult | None:
    count = len(facts.damaged)
    if not count:
        return OK
    more = f" and {count - 1} more are" if count > 1 else " is"
    return RuleResult(True, f"checkpoint {facts.damaged[0]}{more} damaged", count)


@_kind(
    "durable_age", "Last durable checkpoint too old",
    "Longest time since the last checkpoint became durable, or since the start",
    unit="seconds", limit=7200, while_training=True,
)  # fmt: skip
def _durable_age(facts: JobFacts, limit: float) -> RuleResult | None:
    age = facts.durable_age_seconds
    return _above(age, limit, f"no new durable checkpoint for {_duration(age or 0)}", _duration(limit))


@_kind(
    "unsaved_gpu_hours", "Too much unsaved work, in GPU-hours",
    "Most GPU-hours of all ranks that a crash may cost",
    unit="gpu_hours", limit=100, for_seconds=60, while_training=True,
)  # fmt: skip
def _unsaved_gpu_hours(facts: JobFacts, limit: float) -> RuleResult | None:
    hours = facts.unsaved_gpu_hours
    return _above(hours, limit, f"a crash would cost {_number(hours or 0)} GPU-hours of work", _number(limit))


@_kind(
    "unsaved_iterations", "Too much unsaved work, in iterations", "Most iterations that a crash may cost",
    unit="iterations", limit=1000, for_seconds=60, built_in=False, while_training=True,
)  # fmt: skip
def _unsaved_iterations(facts: JobFacts, limit: float) -> RuleResult | None:
    count = facts.unsaved_iterations
    return _above(count, limit, f"a crash would cost {format_iterations(count)}", _number(limit))


@_kind(
    "overhead", "Overhead over budget", "Measured overhead, as a multiple of the budget",
    unit="times_budget", limit=1.2, for_seconds=600, while_training=True,
)  # fmt: skip
def _overhead(facts: JobFacts, limit: float) -> RuleResult | None:
    overhead, budget = facts.measured_overhead, facts.budget
    if overhead is None or not budget:
        return None
    limit_text = f"{limit:.3g} × the budget of {budget * 100:.3g} %"
    return _above(overhead / budget, limit, f"overhead {overhead * 100:.3g} %", limit_text)


@_kind(
    "throughput_drop", "Throughput dropped",
    "How far throughput may drop below that of the job's own last hours, in percent",
    unit="percent", limit=20, for_seconds=600, while_training=True,
)  # fmt: skip
def _throughput_drop(facts: JobFacts, limit: float) -> RuleResult | None:
    now, usual = facts.throughput, facts.usual_throughput
    if now is None or not usual:
        return None
    unit, below = facts.throughput_unit, (1 - now / usual) * 100
    message = f"{_number(now)} {unit} per second, {below:.0f} % below the usual {_number(usual)}"
    return _above(below, limit, message, f"{limit:g} %")


@_kind(
    "iteration_time", "Iterations slower than usual",
    "How much longer iterations may take than in the job's own last hours, in percent",
    unit="percent", limit=25, for_seconds=600, while_training=True,
)  # fmt: skip
def _iteration_time(facts: JobFacts, limit: float) -> RuleResult | None:
    now, usual = facts.iteration_seconds, facts.usual_iteration_seconds
    if now is None or not usual:
        return None
    above = (now / usual - 1) * 100
    message = f"an iteration takes {duration(now)}, {above:.0f} % more than the usual {duration(usual)}"
    return _above_floor(above, limit, message, now - usual)


@_kind(
    "goodput_low", "Goodput low", "Smallest share of the last hour that advanced training, in percent",
    unit="percent", limit=50, for_seconds=600, while_training=True, analyzed=True,
)  # fmt: skip
def _goodput_low(facts: JobFacts, limit: float) -> RuleResult | None:
    if facts.goodput is None:
        return None
    share = facts.goodput * 100
    message = f"{share:.0f} % of the last hour advanced training"
    return RuleResult(share < limit, message, share, clear=share >= limit / CLEAR, limit=f"{limit:g} %")


@_kind(
    "data_wait", "Waiting for data", "Largest share of the last 10 minutes spent waiting for data, in percent",
    unit="percent", limit=30, for_seconds=600, while_training=True, analyzed=True,
)  # fmt: skip
def _data_wait(facts: JobFacts, limit: float) -> RuleResult | None:
    found = facts.ranks
    if found is None:
        return None
    share = found.data_share * 100
    return _above_floor(share, limit, f"waiting for data {share:.0f} % of the time", found.data_seconds_each)


@_kind(
    "straggler", "Slow rank", "How much longer a rank may take than the others over 10 minutes, in percent",
    unit="percent", limit=20, for_seconds=600, while_training=True, analyzed=True,
)  # fmt: skip
def _straggler(facts: JobFacts, limit: float) -> RuleResult | None:
    found = facts.ranks
    if found is None:
        return None
    if found.slowest is None:
        return RuleResult(False, "", 0.0)
    slower = found.slower * 100
    message = f"rank {found.slowest} takes {slower:.0f} % longer than the others because of {found.why}"
    return _above_floor(slower, limit, message, found.slower_seconds)


@_kind(
    "disk_filling", "Store filling up", "Smallest number of further checkpoints that fit in the store",
    unit="checkpoints", limit=3, while_training=True,
)  # fmt: skip
def _disk_filling(facts: JobFacts, limit: float) -> RuleResult | None:
    room = facts.room_checkpoints
    if room is None or facts.store_free_bytes is None:
        return None
    whole, free = math.floor(room), format_bytes(facts.store_free_bytes)
    detail = f": the store had {free} free at the last checkpoint"
    if facts.store:
        total = "" if facts.store_total_bytes is None else f" of {format_bytes(facts.store_total_bytes)}"
        detail = f": {facts.store} has {free}{total} free"
    return RuleResult(
        room < limit, f"room for {whole:,} further checkpoint{'s' * (whole != 1)}", room,
        clear=room >= limit / CLEAR, limit=f"{limit:.3g}", detail=detail,
    )  # fmt: skip


@_kind("loss_nan", "Loss not finite", "The newest loss is nan or infinite", for_seconds=60, while_training=True)
def _loss_nan(facts: JobFacts, limit: float) -> RuleResult | None:
    if facts.loss is None:
        return None
    if math.isfinite(facts.loss):
        return OK
    if facts.finite_loss_iteration is None:
        return RuleResult(True, f"the loss is {facts.loss}")
    last = min(facts.finite_loss_iteration, facts.iteration)  # it may be of a lineage that a restore abandoned
    detail = f"; the last finite one was at iteration {last:,}"
    return RuleResult(True, f"the loss is {facts.loss}", iteration=last + 1, lineage=facts.lineage, detail=detail)


@_kind(
    "loss_spike", "Loss spike",
    "How far the loss may exceed the median of the iterations before it, as a multiple of its usual noise",
    unit="spreads", limit=6, window=200, while_training=True,
)  # fmt: skip
def _loss_spike(facts: JobFacts, limit: float) -> RuleResult | None:
    open_spike = facts.open_spike
    if open_spike is not None and not len(open_spike.before):
        open_spike = None  # the server no longer has the samples before it
    ended = open_spike and open_spike.has_ended(facts.newest_losses, limit, facts.window, facts.start_loss)
    if open_spike is not None and not ended:
        lasts = facts.iteration - open_spike.iteration >= NEWEST_LOSSES - 1
        return None if ended is None else _open_spike(open_spike, lasts=lasts)
    if facts.losses is None:
        return None if open_spike is None else OK
    spike = facts.losses.newest_spike(limit, facts.window)
    if spike is None:
        return OK
    subject = f"{facts.lineage}-{spike.iteration}"
    lasts = facts.losses.lasts(spike, limit)
    if open_spike is not None and subject == open_spike.subject:
        return _open_spike(open_spike, lasts=lasts)
    height = f"{_number(spike.spreads)} × the usual noise higher (limit {limit:g})"
    return RuleResult(
        True, f"the loss was {spike.loss:.4g} at iteration {spike.iteration:,}", spike.spreads, subject=subject,
        iteration=spike.iteration, lineage=facts.lineage, is_announced=lasts,
        detail=f", usually {spike.usual:.4g}: {height}" + LASTING * lasts,
    )  # fmt: skip


def _open_spike(spike: OpenSpike, *, lasts: bool) -> RuleResult:
    known = spike.message.endswith(LASTING)
    return RuleResult(
        True, spike.message + LASTING * (lasts and not known), spike.value, subject=spike.subject,
        iteration=spike.iteration, lineage=spike.lineage, is_announced=lasts or known,
    )  # fmt: skip


@_kind(
    "restore_failed", "Restore failed", "How long the alert for a restore that failed or expired is open",
    unit="seconds", limit=3600, severity="critical",
)  # fmt: skip
def _restore_failed(facts: JobFacts, limit: float) -> RuleResult | None:
    order = facts.order
    if order is None or order.state not in ("failed", "expired") or order.ago_seconds > limit:
        return OK
    message = f"not restored to iteration {order.iteration:,}: {order.reason or order.state}"
    return RuleResult(True, message, subject=order.id)


@_kind(
    "restore_finished", "Restore finished", "How long the alert for a completed restore is open",
    unit="seconds", limit=600, severity="info", built_in=False,
)  # fmt: skip
def _restore_finished(facts: JobFacts, limit: float) -> RuleResult | None:
    order = facts.order
    if order is None or order.state != "restored" or order.ago_seconds > limit:
        return OK
    took = "" if order.seconds is None else f" in {duration(order.seconds)}"
    return RuleResult(True, f"restored to iteration {order.iteration:,}{took}", subject=order.id)
