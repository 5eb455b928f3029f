"""What every policy is: a function from what was measured and what is wanted to a `Plan`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from .profile import Plan, Profile, SnapshotMode
from .settings import MAX_INTERVAL, Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What a policy may know of the job's life so far, beside its profile."""

    iterations: int = 0
    """Iterations finished, over all attempts."""
    failures: int = 0
    """Attempts that ended without being asked to."""


Policy = Callable[[Profile, Settings, History], Plan]


def expect(
    profile: Profile, interval: int, *, mode: SnapshotMode, policy: str, cost_seconds: float, reason: str
) -> Plan:
    """The plan of a checkpoint every `interval` iterations, with what it costs and what it leaves exposed."""
    usable = usable_iteration(profile)
    overhead = cost_seconds / (interval * profile.iteration_seconds) if usable else None
    exposure = exposure_iterations(profile, interval)
    return Plan(
        interval=interval,
        mode=mode,
        policy=policy,
        cost_seconds=cost_seconds,
        overhead=overhead,
        exposure_iterations=exposure,
        exposure_seconds=exposure * profile.iteration_seconds * (1 + overhead) if overhead is not None else None,
        reason=reason,
    )


def exposure_iterations(profile: Profile, interval: int) -> int:
    """The most iterations a failure can lose: those since the last checkpoint but one, while the last is written.

    A checkpoint is durable `lag` iterations after it was due. While that is no more than the interval, k + lag
    (at most 2k) are exposed. A shorter interval than the lag cannot be kept: with one checkpoint under way the
    next starts at the first multiple of k after it.
    """
    if not usable_iteration(profile):
        return interval
    lag = ceil((_known(profile.snapshot_seconds) + _known(profile.persist_seconds)) / profile.iteration_seconds)
    spacing = interval * max(1, ceil(lag / interval))
    return spacing + lag


def usable_iteration(profile: Profile) -> bool:
    return math.isfinite(profile.iteration_seconds) and profile.iteration_seconds > 0


def ceil(number: float) -> int:
    """Round up, forgiving the last bits that division leaves behind: 0.3 / 0.1 is 3, not 4."""
    return math.ceil(min(number, MAX_INTERVAL) * (1 - 1e-12))


def percent(fraction: float) -> str:
    return f"{fraction * 100:.3g}%"


def duration(seconds: float) -> str:
    """Seconds as a person reads them: `4.2 s`, `35 ms`, `12 min`."""
    if seconds >= 7200:
        return f"{seconds / 3600:.3g} h"
    if seconds >= 120:
        return f"{seconds / 60:.3g} min"
    if seconds >= 1 or seconds == 0:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"


def plural(iterations: int) -> str:
    return "1 iteration" if iterations == 1 else f"{iterations:,} iterations"


def _known(seconds: float) -> float:
    return seconds if math.isfinite(seconds) and seconds > 0 else 0.0
