"""The type of a policy, and what several policies share: failure estimates, rounding, reasons as text."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from holdfast.pacing.failures import FailureEstimate, FailureHistory
from holdfast.pacing.profile import IntervalPlan, Profile
from holdfast.pacing.settings import MAX_INTERVAL, PacingSettings
from holdfast.units import duration

Policy = Callable[[Profile, PacingSettings, FailureHistory], IntervalPlan]


def estimate_failures(settings: PacingSettings, history: FailureHistory) -> FailureEstimate:
    """Estimate the failure rate; an MTBF from the settings replaces the published one as the prior."""
    if settings.mtbf_seconds is None:
        return history.failures
    return replace(history.failures, mean_seconds=settings.mtbf_seconds)


def describe_failures(failures: FailureEstimate) -> str:
    """Describe the estimated failure rate and its evidence."""
    if failures.count > 0:
        basis = f"{failures.count:.3g} seen in {duration(failures.exposure_seconds)}"
    elif failures.stated:
        basis = "as set"
    else:
        gpus = "one GPU" if failures.world_size <= 1 else f"{failures.world_size:,} GPUs"
        basis = f"published rate for {gpus}"
    if failures.count == 0 and failures.exposure_seconds > 0:
        basis += f", none seen in {duration(failures.exposure_seconds)}"
    return f"a failure is expected every {duration(1 / failures.rate)} ({basis})"


def describe_cost(profile: Profile, cost_seconds: float) -> str:
    basis = "predicted" if profile.cost_seconds is None else "measured"
    return f"a checkpoint costs {duration(cost_seconds)} ({basis})"


def has_iteration_time(profile: Profile) -> bool:
    return math.isfinite(profile.iteration_seconds) and profile.iteration_seconds > 0


def known(seconds: float) -> float:
    """Return a measured duration, or 0 if it is not finite and positive."""
    return seconds if math.isfinite(seconds) and seconds > 0 else 0.0


def ceil(number: float) -> int:
    """Round up, ignoring the rounding error of a division: 0.3 / 0.1 is 3, not 4."""
    return math.ceil(min(number, MAX_INTERVAL) * (1 - 1e-12))
