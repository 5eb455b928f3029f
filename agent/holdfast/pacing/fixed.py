"""An interval that a person chose, kept whatever it costs; what it costs is said."""

from __future__ import annotations

from dataclasses import replace

from .bounds import lag_seconds
from .checkfreq import checkfreq
from .expectation import expect
from .policy import History, percent, plural, usable_iteration
from .profile import Plan, Profile
from .settings import Settings


def fixed(profile: Profile, settings: Settings, history: History) -> Plan:
    """Every `settings.every` iterations; without that number CheckFreq decides."""
    if settings.every is None:
        plan = checkfreq(profile, settings, history)
        return replace(
            plan, reason=f"no interval is set for the policy fixed, so checkfreq decides: {plan.reason}"
        )
    interval = max(1, settings.every)
    plan = expect(profile, settings, history, interval, policy="fixed", reason=f"set to every {plural(interval)}")
    return replace(plan, reason=f"{plan.reason}{_warning(profile, settings, plan)}")


def _warning(profile: Profile, settings: Settings, plan: Plan) -> str:
    if not usable_iteration(profile) or plan.overhead is None or plan.interval is None:
        return ""
    if plan.overhead > settings.budget:
        return f": {percent(plan.overhead)} is more than the budget of {percent(settings.budget)}"
    if lag_seconds(profile) > plan.interval * profile.iteration_seconds + plan.cost_seconds:
        return ": writing one takes longer than that, so checkpoints will wait for each other"
    return f", within the budget of {percent(settings.budget)}"
