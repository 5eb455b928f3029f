"""Policies of others: entry points of the group `holdfast.policies`, each a function like those here.

    [project.entry-points."holdfast.policies"]
    tidal = "my_package.tidal:tidal"

They are looked for when a name is asked for that is none of ours, and loaded when they are first needed. What is
wrong with one is said, and never stops a job: checkfreq decides then. `expectation.expect_within` makes a whole
plan of a wanted interval.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from .checkfreq import checkfreq
from .expectation import expect
from .policy import History, Policy
from .profile import Plan, Profile
from .settings import MAX_INTERVAL, Settings

GROUP = "holdfast.policies"


@cache
def installed() -> dict[str, EntryPoint]:
    """By name, in small letters."""
    return {entry.name.lower(): entry for entry in entry_points(group=GROUP)}


def load(name: str) -> Policy:
    """The installed policy of this name, safe to call with anything; ValueError where it cannot be loaded."""
    found = _loaded(name)
    if isinstance(found, str):
        raise ValueError(found)
    return found


@cache
def _loaded(name: str) -> Policy | str:
    """What is wrong, where it cannot be loaded: that is not tried again."""
    entry = installed()[name]
    try:
        policy = entry.load()
    except Exception as error:  # importing a module of others' may raise anything
        return f"policy {name!r} of {entry.value} cannot be loaded: {_told(error)}"
    if not callable(policy):
        return f"policy {name!r} of {entry.value} is no function"

    def guarded(profile: Profile, settings: Settings, history: History) -> Plan:
        try:
            plan: object = policy(profile, settings, history)
        except Exception as error:  # what others wrote must not stop training
            return _instead(profile, settings, history, f"policy {name!r} failed: {_told(error)}")
        if not isinstance(plan, Plan) or not _can_be_kept(plan.interval):
            return _instead(profile, settings, history, f"policy {name!r} made no plan that can be kept")
        if plan.interval is None:
            return Plan(interval=None, policy=name, reason=str(plan.reason))
        # the rest is ours to say
        return expect(profile, settings, history, plan.interval, policy=name, reason=str(plan.reason))

    return guarded


def _instead(profile: Profile, settings: Settings, history: History, because: str) -> Plan:
    plan = checkfreq(profile, settings, history)
    return replace(plan, reason=f"{because}; checkfreq decides: {plan.reason}")


def _can_be_kept(interval: object) -> bool:
    return interval is None or (isinstance(interval, int) and 1 <= interval <= MAX_INTERVAL)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
