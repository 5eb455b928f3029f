"""From settings and a profile to a plan: orders first, then the chosen policy."""

from __future__ import annotations

from dataclasses import replace

from .checkfreq import checkfreq
from .fixed import fixed
from .policy import History, Policy, plural
from .profile import Plan, Profile
from .settings import Settings

policies: dict[str, Policy] = {"checkfreq": checkfreq, "fixed": fixed}


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
    policy = policies.get(settings.policy)
    if policy is None:
        made = checkfreq(profile, settings, history)
        return replace(
            made, reason=f"policy {settings.policy!r} is not known here, checkfreq decides: {made.reason}"
        )
    return policy(profile, settings, history)


def parse_policy(value: str) -> str:
    """The name of a policy as typed; ValueError with the names that exist otherwise."""
    text = str(value).strip().lower()
    if text not in policies:
        raise ValueError(f"policy {value!r} is not one of {', '.join(sorted(policies))}")
    return text
