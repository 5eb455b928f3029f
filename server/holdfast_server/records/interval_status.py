"""Expected cost of the current interval, from the agent's newest profile."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import msgspec
from sqlalchemy import Row

from holdfast.pacing import IntervalPlan, PacingSettings, Profile, plan, policies
from holdfast.pacing.interval_cost import Limit, binding_limit
from holdfast.protocol.wire import IntervalDecision
from holdfast.units import FixedInterval, duration, format_iterations, percent
from holdfast_server import models

CHECKFREQ, FIXED = "checkfreq", "fixed"
NOISE = 0.1
"""Relative difference of the interval that measurements alone explain; the agent does not change it by less."""

_decoder = msgspec.msgpack.Decoder(IntervalDecision)


def paced_of(job: models.JobRecord | Row[Any]) -> IntervalDecision | None:
    """Return the agent's newest interval decision."""
    return _decoder.decode(job.paced) if job.paced else None


def profile_of(paced: IntervalDecision | None) -> Profile | None:
    """Return the profile of a decision; None until an iteration was timed."""
    if paced is None or "iteration_seconds" not in paced.profile:
        return None
    known = {name: value for name, value in paced.profile.items() if name in Profile.__dataclass_fields__}
    return Profile(**known)  # type: ignore[arg-type]


def settings_of(job: models.JobRecord | Row[Any], paced: IntervalDecision | None) -> PacingSettings:
    """Return the settings of a job: those of operators, else those that the agent reported.

    While an interval is fixed, the agent reports no other policy; the default stands for it.
    """
    own = PacingSettings() if paced is None else _reported(paced)
    policy = PacingSettings().policy if own.policy == FIXED else own.policy
    return PacingSettings(
        budget=job.budget or own.budget,
        policy=job.policy or policy,
        write_bytes_per_second=job.write_bytes_per_second or own.write_bytes_per_second,
        max_unsaved_seconds=job.max_unsaved_seconds or own.max_unsaved_seconds,
    )


def _reported(paced: IntervalDecision) -> PacingSettings:
    """Return the settings that the agent reported with its interval."""
    own = PacingSettings(
        budget=paced.budget, policy=paced.policy, write_bytes_per_second=paced.write_bytes_per_second
    )
    unsaved_seconds = paced.max_unsaved_seconds
    return own if unsaved_seconds is None else replace(own, max_unsaved_seconds=unsaved_seconds)


def in_force(paced: IntervalDecision | None) -> IntervalPlan | None:
    """Return the plan for the current interval; None without an interval or a profile."""
    profile = profile_of(paced)
    if paced is None or profile is None or paced.interval is None:
        return None
    every: FixedInterval = paced.interval
    if paced.interval_seconds is not None:
        every = timedelta(seconds=paced.interval_seconds)
    return plan(profile, replace(_reported(paced), every=every))


def limit_of(paced: IntervalDecision | None) -> Limit | None:
    """Return the limit that decides the current interval; `None` where the policy is free, or it is fixed."""
    profile = profile_of(paced)
    if paced is None or profile is None or paced.interval is None or paced.policy == FIXED:
        return None
    return binding_limit(profile, _reported(paced), paced.interval)


def reason_of(paced: IntervalDecision | None) -> str:
    """Explain the current interval, and the condition of its next change."""
    if paced is None:
        return ""
    reason = _reason_now(paced)
    return f"{reason}; {paced.pending}" if paced.pending else reason


def _reason_now(paced: IntervalDecision) -> str:
    """Explain the current interval.

    The agent gave its reason when it decided, and costs have changed since. Recomputed from the newest profile,
    the reason agrees with the other figures of the page. If the policy would now decide otherwise, it says both.
    """
    profile, held = profile_of(paced), in_force(paced)
    if profile is None or held is None or held.overhead is None or paced.policy not in policies:
        return paced.reason
    if paced.policy == FIXED:
        return held.reason
    if paced.policy != CHECKFREQ:  # others depend on the history of the job, which the agent knows better
        return paced.reason
    now = plan(profile, _reported(paced))
    if now.interval == held.interval:
        return now.reason
    price = f"a checkpoint costs {duration(held.cost_seconds)}"
    share = f"{percent(held.overhead)} of {format_iterations(paced.interval or 1)}"
    every = held.interval or 1
    if paced.pending or now.interval is None or abs(now.interval - every) <= NOISE * every:
        return f"{price}, {share}"
    longer = now.interval > every
    until = "over the budget" if longer else "clearly below half the budget"
    return (
        f"{price}, {share}; latest measurements suggest every {format_iterations(now.interval)}: the interval "
        f"{'grows' if longer else 'shrinks'} if the overhead stays {until}"
    )
