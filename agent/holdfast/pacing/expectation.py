"""What is to be expected of an interval: its cost, what it leaves exposed, and what it makes of the job's time."""

from __future__ import annotations

from .bounds import budget_interval, checkpoint_cost, lag_seconds, pipeline_interval, predicted_stall
from .policy import History, ceil, duration, failures_of, known, percent, plural, usable_iteration
from .profile import Plan, Profile
from .renewal import effective_ratio
from .settings import MAX_INTERVAL, Settings


def expect(
    profile: Profile, settings: Settings, history: History, interval: int, *, policy: str, reason: str
) -> Plan:
    """The plan of a checkpoint every `interval` iterations, whatever it costs."""
    usable = usable_iteration(profile)
    mode, _ = predicted_stall(profile)
    cost = checkpoint_cost(profile)
    overhead = cost / (interval * profile.iteration_seconds) if usable else None
    exposure = exposure_iterations(profile, interval)
    return Plan(
        interval=interval,
        mode=mode,
        policy=policy,
        cost_seconds=cost,
        overhead=overhead,
        exposure_iterations=exposure,
        exposure_seconds=exposure * profile.iteration_seconds * (1 + overhead) if overhead is not None else None,
        effective=effective(profile, settings, history, interval) if usable else None,
        in_flight=max(1, profile.in_flight),
        reason=reason,
    )


def expect_within(
    profile: Profile, settings: Settings, history: History, wanted: float, *, policy: str, reason: str
) -> Plan:
    """The plan of a checkpoint every `wanted` iterations, or as near above as the budget and the pipeline allow.

    `reason` says why so many are wanted; where another bound decides, that is added to it. There is no interval
    where no iteration was timed, or where none is within the budget.
    """
    mode, _ = predicted_stall(profile)
    cost = checkpoint_cost(profile)
    if not usable_iteration(profile):
        return Plan(
            interval=None, policy=policy, reason="no checkpoints are planned: no iteration has been timed yet"
        )
    affordable = budget_interval(profile, settings.budget)
    if affordable is None:
        reason = (
            f"no checkpoints are planned: one costs {duration(cost)} and the budget is {percent(settings.budget)}"
        )
        return Plan(interval=None, mode=mode, policy=policy, cost_seconds=cost, reason=reason)
    pipeline = pipeline_interval(profile)
    # the bound comes first: of two numbers, max keeps it where the other is not a number
    interval = int(min(max(1, pipeline, affordable, wanted), MAX_INTERVAL))
    if interval > wanted and interval > 1:
        reason += f"; {_what_decides(profile, settings, affordable, pipeline)}"
    return expect(profile, settings, history, interval, policy=policy, reason=reason)


def _what_decides(profile: Profile, settings: Settings, affordable: int, pipeline: int) -> str:
    if affordable >= pipeline:
        return f"the budget of {percent(settings.budget)} allows one every {plural(affordable)} at most"
    busy = duration(lag_seconds(profile))
    return f"one takes {busy} to become durable and the next waits for it: every {plural(pipeline)}"


def effective(profile: Profile, settings: Settings, history: History, interval: int) -> float:
    """ETTR at this interval, for the failure rate that is known or assumed; an iteration must have been timed.

    An interval that writing cannot keep up with counts as what becomes of it: every next one waits.
    """
    kept = interval * max(1, ceil(pipeline_interval(profile) / interval))
    return effective_ratio(
        kept * profile.iteration_seconds,
        rate=failures_of(settings, history).rate,
        cost_seconds=checkpoint_cost(profile),
        lag_seconds=lag_seconds(profile),
        restart_seconds=known(history.restart_seconds),
    )


def exposure_iterations(profile: Profile, interval: int) -> int:
    """The most iterations a failure can lose: those since the last checkpoint but one, while the last is written.

    A checkpoint is durable `lag` iterations after it was due. While that is no more than the interval, k + lag
    (at most 2k) are exposed. A shorter interval than the lag cannot be kept: with one checkpoint under way the
    next starts at the first multiple of k after it, with N of them at the first after an Nth of it.
    """
    if not usable_iteration(profile):
        return interval
    lag = ceil(lag_seconds(profile) / profile.iteration_seconds)
    spacing = interval * max(1, ceil(lag / (interval * max(1, profile.in_flight))))
    return spacing + lag
