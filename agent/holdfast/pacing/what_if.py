"""What if: what every interval would be worth, for a job that runs or for one that is only planned.

An interval is judged by the share of time that moves training forward for good (ETTR, see `interval_cost`). Too
short, and checkpoints eat it up; too long, and every failure does. The price of a choice is the GPU-hours a day by
which it falls behind the best one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from holdfast.pacing.failures import Failures, History
from holdfast.pacing.interval_cost import (
    best_interval,
    checkpoint_cost,
    effective_ratio,
    exposure_iterations,
    kept_interval,
    lag_seconds,
    pipeline_interval,
)
from holdfast.pacing.planner import plan, policy_names
from holdfast.pacing.policy import ceil, failures_of, known, usable_iteration
from holdfast.pacing.profile import Profile
from holdfast.pacing.settings import MAX_INTERVAL, Settings

POINTS = 60
"""On the curve, evenly spaced on a logarithmic scale."""
HOURS_A_DAY = 24
REACH = 16.0
"""The curve goes at least so far to both sides of the optimum, as a factor."""
FARTHEST = 2000.0
"""It follows an odd choice no farther than that: the optimum has to stay visible."""

LEAST_SPAN = 0.01
"""Of the ETTR shown: a curve that is flat within a hundredth looks flat."""
_TIMES = [
    base * unit
    for unit, bases in (
        (1e-3, (1, 2, 5, 10, 20, 50, 100, 200, 500)),
        (1.0, (1, 2, 5, 10, 20, 30)),
        (60.0, (1, 2, 5, 10, 20, 30)),
        (3600.0, (1, 2, 5, 12)),
        (86400.0, (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)),
    )
    for base in bases
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    interval_seconds: float
    effective: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """An interval and what is to be expected of it; nothing is, where no checkpoints are taken."""

    name: str
    """`optimum`, `in force`, or the name of a policy."""
    interval: int | None
    """Iterations between checkpoints; None: none are taken."""
    interval_seconds: float | None = None
    """What they take by themselves."""
    kept_seconds: float | None = None
    """From one checkpoint to the next in fact: longer, where writing one takes longer than the interval."""
    overhead: float | None = None
    effective: float | None = None
    """ETTR: the share of time that moves training forward and is not lost again."""
    exposure_iterations: int | None = None
    exposure_seconds: float | None = None
    """The most that a failure takes back."""
    lost_seconds: float | None = None
    """What one takes back on average over the moments at which it may come."""
    lost_gpu_hours: float | None = None
    """The same on all GPUs together, and the most of it."""
    lost_gpu_hours_most: float | None = None
    safe: float | None = None
    """The probability that no failure comes between one durable checkpoint and the next."""
    idle_gpus: float | None = None
    """As if so many GPUs stood still, measured against the optimum."""
    gpu_hours_a_day: float | None = None
    """The same in GPU-hours a day: the price of this choice."""
    within_budget: bool | None = None
    decided_by: str = ""
    """The policy that did, where one that cannot left it to another."""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """The answer: the curve, the best interval, and the others beside it."""

    curve: tuple[Point, ...]
    best: Choice
    present: Choice | None
    """What is in force; None where nothing is."""
    around: tuple[Choice, ...]
    """Half and twice the best interval: how much it matters to hit it. Left out where it is the same one."""
    asked: tuple[Choice, ...]
    """Intervals that were asked for."""
    policies: tuple[Choice, ...]
    budget: float
    budget_seconds: float
    """The shortest interval that keeps the cost within the budget."""
    shortest_seconds: float
    """The shortest one that can be kept: a checkpoint is durable before the next begins."""
    world_size: int
    iteration_seconds: float
    cost_seconds: float
    lag_seconds: float
    """From the snapshot until it is durable."""
    restart_seconds: float
    mtbf_seconds: float
    """The mean time between failures of the whole job, as estimated from what is known of them."""
    mtbf_low_seconds: float
    mtbf_high_seconds: float
    """It is between these two with a probability of 90 %."""


def outlook(
    profile: Profile,
    settings: Settings,
    history: History = History(),  # noqa: B008
    *,
    present: int | None = None,
    asked: Sequence[int] = (),
) -> Outlook:
    """Weigh every interval for a job of this profile.

    Args:
        profile: measured, or made of sizes and bandwidths.
        settings: the budget, above all; each policy is asked in turn, whichever is set.
        history: failures and the time that a restart takes.
        present: the interval in force.
        asked: other intervals to judge beside it.

    Raises:
        ValueError: the profile has no iteration time.
    """
    if not usable_iteration(profile):
        raise ValueError("the time of an iteration is not known: nothing can be planned without it")
    scale = _Scale(profile, settings, history)
    optimum = scale.optimum
    low, high = scale.failures.interval()
    answer = Outlook(
        curve=(),
        best=scale.judge("optimum", optimum),
        present=None if present is None else scale.judge("in force", present),
        around=tuple(
            scale.judge(name, interval)
            for name, interval in (
                ("half the optimum", optimum // 2),
                ("twice the optimum", optimum * 2),
            )
            if 1 <= interval <= MAX_INTERVAL
        ),
        asked=tuple(scale.judge(f"every {each:,}", each) for each in asked),
        policies=tuple(scale.decision(name) for name in policy_names()),
        budget=settings.budget,
        budget_seconds=scale.cost_seconds / settings.budget,
        shortest_seconds=scale.shortest * profile.iteration_seconds,
        world_size=scale.failures.world_size,
        iteration_seconds=profile.iteration_seconds,
        cost_seconds=scale.cost_seconds,
        lag_seconds=scale.lag_seconds,
        restart_seconds=scale.restart_seconds,
        mtbf_seconds=1 / scale.rate,
        mtbf_low_seconds=1 / high,
        mtbf_high_seconds=1 / low,
    )
    return replace(answer, curve=_curve(scale, answer))


def at_world_size(failures: Failures, world_size: int) -> Failures:
    """The same job on another number of GPUs: what was seen counts for as long as it would have taken there."""
    there = replace(failures, world_size=world_size)
    return replace(
        there, exposure_seconds=failures.exposure_seconds * there.prior_seconds / failures.prior_seconds
    )


class _Scale:
    """Puts a figure to an interval, the same way for all of them."""

    def __init__(self, profile: Profile, settings: Settings, history: History) -> None:
        self.profile, self.settings, self.history = profile, settings, history
        self.failures = failures_of(settings, history)
        self.rate = self.failures.rate
        self.restart_seconds = known(history.restart_seconds)
        self.cost_seconds = checkpoint_cost(profile)
        self.lag_seconds = lag_seconds(profile)
        self.shortest = min(pipeline_interval(profile), MAX_INTERVAL)
        self.optimum = best_interval(profile, self.rate, shortest=self.shortest)

    def effective(self, interval_seconds: float) -> float:
        return effective_ratio(
            interval_seconds,
            rate=self.rate,
            cost_seconds=self.cost_seconds,
            lag_seconds=self.lag_seconds,
            restart_seconds=self.restart_seconds,
        )

    def decision(self, name: str) -> Choice:
        """The interval that a policy chooses."""
        # only fixed rests on an interval that was set
        every = self.settings.every if name == "fixed" else None
        chosen = plan(self.profile, replace(self.settings, policy=name, every=every, paused=False), self.history)
        decided_by = "" if chosen.policy == name else chosen.policy
        return self.judge(name, chosen.interval, decided_by=decided_by, reason=chosen.reason)

    def judge(self, name: str, interval: int | None, *, decided_by: str = "", reason: str = "") -> Choice:
        if interval is None:
            return Choice(name=name, interval=None, decided_by=decided_by, reason=reason)
        seconds, gpus = self.profile.iteration_seconds, self.failures.world_size
        kept = kept_interval(self.profile, interval)
        overhead = self.cost_seconds / (kept * seconds)
        effective = self.effective(kept * seconds)
        lag = ceil(self.lag_seconds / seconds)
        a_step = seconds * (1 + overhead)
        exposure = exposure_iterations(self.profile, interval)
        behind = max(0.0, self.effective(self.optimum * seconds) - effective)
        return Choice(
            name=name,
            interval=interval,
            interval_seconds=interval * seconds,
            kept_seconds=kept * seconds,
            overhead=overhead,
            effective=effective,
            exposure_iterations=exposure,
            exposure_seconds=exposure * a_step,
            lost_seconds=(kept / 2 + lag) * a_step,
            lost_gpu_hours=(kept / 2 + lag) * a_step * gpus / 3600,
            lost_gpu_hours_most=exposure * a_step * gpus / 3600,
            safe=self.failures.none_within(kept * a_step),
            idle_gpus=behind * gpus,
            gpu_hours_a_day=behind * gpus * HOURS_A_DAY,
            within_budget=overhead <= self.settings.budget * (1 + 1e-9),
            decided_by=decided_by,
            reason=reason,
        )


def _curve(scale: _Scale, answer: Outlook) -> tuple[Point, ...]:
    """Wide enough for all that is to be marked on it, from the shortest interval that can be kept."""
    centre = answer.best.kept_seconds or scale.profile.iteration_seconds
    held = (answer.present, *answer.asked, *answer.policies)
    marks = [each.kept_seconds for each in held if each is not None and each.kept_seconds is not None]
    marks += [answer.budget_seconds] if answer.budget_seconds > 0 else []
    low = max(min(centre / REACH, *(mark / 2 for mark in marks)), answer.shortest_seconds, centre / FARTHEST)
    high = min(max(centre * REACH, *(mark * 2 for mark in marks)), centre * FARTHEST)
    step = (high / low) ** (1 / (POINTS - 1))
    return tuple(
        Point(interval_seconds=at, effective=scale.effective(at)) for at in (low * step**n for n in range(POINTS))
    )


class Frame:
    """Places on a picture of an outlook's curve, as fractions from the left and from the bottom.

    Shared by the terminal and the page, so that both draw the same picture.
    """

    def __init__(self, outlook: Outlook) -> None:
        self.low, self.high = outlook.curve[0].interval_seconds, outlook.curve[-1].interval_seconds
        best = outlook.best.effective or 0.0
        held = (outlook.present, *outlook.around, *outlook.asked, *outlook.policies)
        worst = min(
            (each.effective for each in held if each is not None and each.effective is not None), default=best
        )
        span = max((best - worst) * 1.3, LEAST_SPAN)
        self.top = min(1.0, best + span / 12)
        self.bottom = max(0.0, best - span)

    def x(self, seconds: float) -> float:
        """On a logarithmic scale; what is outside is at the edge."""
        if seconds <= self.low:
            return 0.0
        return min(1.0, math.log(seconds / self.low) / math.log(self.high / self.low))

    def y(self, effective: float) -> float:
        """Below 0 where the curve leaves the picture."""
        return (effective - self.bottom) / (self.top - self.bottom)

    def times(self, most: int) -> list[float]:
        """At most so many round times within the frame, about evenly apart."""
        inside = [time for time in _TIMES if self.low <= time <= self.high]
        if len(inside) <= most:
            return inside
        # Those next to even places, so that the labels keep their distance.
        places = [self.low * (self.high / self.low) ** ((n + 0.5) / most) for n in range(most)]
        return sorted({min(inside, key=lambda time: abs(math.log(time / place))) for place in places})

    def shares(self, most: int) -> list[float]:
        """At most so many round ETTRs within the frame."""
        span = self.top - self.bottom
        step = next(
            base * 10.0**power
            for power in range(-6, 1)
            for base in (1, 2, 5)
            if span / (base * 10.0**power) <= most
        )
        first = math.ceil(self.bottom / step - 1e-9)
        return [round(n * step, 9) for n in range(first, math.floor(self.top / step + 1e-9) + 1)]
