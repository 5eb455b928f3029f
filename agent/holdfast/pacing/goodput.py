"""Goodput's policy: the interval at which most of a job's time moves it forward, failures counted.

The exact optimum of the renewal form, W* = (1 + W₀(-exp(-1 - λδ))) / λ (see `renewal`), of which J. W. Young,
CACM 17(9), 1974, and J. T. Daly, FGCS 22(3), 2006, give approximations. λ is the posterior mean of `failures`:
time is lost in proportion to λ, so that its mean is what to plan with. The budget is a ceiling, not a target:
the interval is never shorter than the budget allows, and longer where that gets the job further. Nor is it
shorter than what a checkpoint takes to become durable.
"""

from __future__ import annotations

import math
from dataclasses import replace

from .bounds import checkpoint_cost
from .expectation import expect_within
from .policy import (
    History,
    cost_in_words,
    duration,
    failures_in_words,
    failures_of,
    percent,
    plural,
    usable_iteration,
)
from .profile import Plan, Profile
from .renewal import best_interval_seconds, effective_ratio
from .settings import MAX_INTERVAL, Settings


def goodput(profile: Profile, settings: Settings, history: History) -> Plan:
    """The interval of the highest effective training time ratio that the budget and the pipeline allow."""
    if not usable_iteration(profile):
        return expect_within(profile, settings, history, 1, policy="goodput", reason="")
    best = best_interval(profile, settings, history)
    reason = _why(profile, settings, history, best)
    plan = expect_within(profile, settings, history, best, policy="goodput", reason=reason)
    if plan.effective is None:
        return plan
    return replace(plan, reason=f"{plan.reason}; {percent(plan.effective)} of the time moves training forward")


def best_interval(profile: Profile, settings: Settings, history: History) -> int:
    """The whole number of iterations nearest to W* by ETTR, without regard to what is allowed."""
    cost, rate = checkpoint_cost(profile), failures_of(settings, history).rate
    ideal = best_interval_seconds(rate, cost) / profile.iteration_seconds
    below = max(1, math.floor(min(ideal, MAX_INTERVAL)))

    def worth(interval: int) -> float:
        return effective_ratio(interval * profile.iteration_seconds, rate=rate, cost_seconds=cost)

    return max(below, min(below + 1, MAX_INTERVAL), key=worth)


def _why(profile: Profile, settings: Settings, history: History, best: int) -> str:
    cost = cost_in_words(profile, checkpoint_cost(profile))
    return (
        f"for the most progress in the time there is: best every {plural(best)} "
        f"({duration(best * profile.iteration_seconds)}), as {cost} and "
        f"{failures_in_words(failures_of(settings, history))}"
    )
