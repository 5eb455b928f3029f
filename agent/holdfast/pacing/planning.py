"""From settings and a profile to a plan: orders first, then the chosen policy."""

from __future__ import annotations

from dataclasses import replace

from . import plugins
from .checkfreq import checkfreq
from .coci import coci
from .convergence import convergence
from .fixed import fixed
from .goodput import goodput
from .policy import History, Policy, plural
from .profile import Plan, Profile
from .settings import Settings
from .young_daly import young_daly

policies: dict[str, Policy] = {
    "checkfreq": checkfreq,
    "goodput": goodput,
    "young-daly": young_daly,
    "convergence": convergence,
    "coci": coci,
    "fixed": fixed,
}
"""Ours. Others' are found by `find_policy`."""


def plan(profile: Profile | None, settings: Settings, history: History = History()) -> Plan:  # noqa: B008
    """The plan in force under `settings`: paused wins over an ordered interval, and that over the policy.

    Never raises: settings may come from a server newer than this agent. A policy unknown here is replaced
    by checkfreq, and the reason says so. `profile` is None until an iteration and a checkpoint were measured.
    """
    if settings.paused:
        return Plan(
            interval=None, policy=settings.policy, overhead=0.0, reason="paused: no checkpoints until resumed"
        )
    if settings.every is not None:
        if profile is None:
            interval = max(1, settings.every)
            return Plan(
                interval=interval, policy="fixed", reason=f"set to every {plural(interval)}; cost not known yet"
            )
        return fixed(profile, settings, history)
    if profile is None:
        return Plan(
            interval=None, policy=settings.policy, reason="still measuring iterations and the first checkpoint"
        )
    try:
        policy = find_policy(settings.policy)
    except ValueError as error:
        made = checkfreq(profile, settings, history)
        return replace(made, reason=f"{error}; checkfreq decides: {made.reason}")
    return policy(profile, settings, history)


def find_policy(name: str) -> Policy:
    """One of ours or of others'; ValueError where there is none of this name, or it cannot be loaded."""
    if name in policies:
        return policies[name]
    if name in plugins.installed():
        return plugins.load(name)
    raise ValueError(f"policy {name!r} is not one of {', '.join(policy_names())}")


def policy_names() -> list[str]:
    """All that can be chosen, others' included."""
    return sorted({*policies, *plugins.installed()})


def parse_policy(value: str) -> str:
    """The name of a policy as typed; ValueError with the names that exist otherwise."""
    text = str(value).strip().lower()
    find_policy(text)
    return text
