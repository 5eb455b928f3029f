"""What every policy is: a function from what was measured and what is wanted to a `Plan`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from holdfast.pacing.failures import Failures, History
from holdfast.pacing.profile import Plan, Profile
from holdfast.pacing.settings import MAX_INTERVAL, Settings

Policy = Callable[[Profile, Settings, History], Plan]


def failures_of(settings: Settings, history: History) -> Failures:
    """What is known of the job's failures: a mean time that was set takes the place of the published one."""
    if settings.mtbf_seconds is None:
        return history.failures
    return replace(history.failures, mean_seconds=settings.mtbf_seconds)


def failures_in_words(failures: Failures) -> str:
    """How often failures are to be expected, and what says so."""
    if failures.count > 0:
        basis = f"{failures.count:.3g} seen in {duration(failures.exposure_seconds)}"
    elif failures.stated:
        basis = "as stated"
    else:
        gpus = "one GPU" if failures.world_size <= 1 else f"{failures.world_size:,} GPUs"
        basis = f"as published for {gpus}"
    if failures.count == 0 and failures.exposure_seconds > 0:
        basis += f", none seen in {duration(failures.exposure_seconds)}"
    return f"a failure is to be expected every {duration(1 / failures.rate)} ({basis})"


def cost_in_words(profile: Profile, cost_seconds: float) -> str:
    basis = "predicted" if profile.cost_seconds is None else "measured"
    return f"a checkpoint costs {duration(cost_seconds)} ({basis})"


def usable_iteration(profile: Profile) -> bool:
    return math.isfinite(profile.iteration_seconds) and profile.iteration_seconds > 0


def known(seconds: float) -> float:
    """A measured duration, or 0 where that is none."""
    return seconds if math.isfinite(seconds) and seconds > 0 else 0.0


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
