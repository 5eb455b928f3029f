"""What a policy is: its input, its result, and what several of them share."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal

from holdfast.pacing.failures import FailureEstimate, FailureHistory
from holdfast.pacing.settings import PacingSettings
from holdfast.units import duration

SnapshotMode = Literal["cpu", "gpu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The quantities of CheckFreq (Mohan, Phanishayee, Chidambaram, FAST'21, 4.2), in seconds and bytes."""

    iteration_seconds: float
    """Ti: one iteration with no checkpoint in flight; a wait of more than 5 medians counts as 5."""
    mean_seconds: float | None = None
    """Mean time from one iteration to the next, with every wait that recurs; `None`: not measured."""
    update_seconds: float = 0.0
    """Tw: the optimizer step, during which parameters change."""
    snapshot_seconds: float = 0.0
    """Tc: copying the state to host memory."""
    device_copy_seconds: float = math.inf
    """Tg: copying the state within device memory; infinite without a device."""
    persist_seconds: float = 0.0
    """Ts: from host memory to durable, with `in_flight` checkpoints being written."""
    in_flight: int = 1
    """N: the maximum number of checkpoints in flight."""
    checkpoint_bytes: int = 0
    """m: the size of a checkpoint."""
    state_bytes: float | None = None
    """Size of a checkpoint of all ranks before encoding; `None`: m."""
    written_bytes: float | None = None
    """Mean of what one checkpoint sends to the store, of all ranks: without what is linked, after encoding, with
    parity. `None`: its size."""
    memory_used_bytes: int = 0
    """M: peak use of device memory by training."""
    memory_total_bytes: int = 0
    """Mmax: all device memory."""
    cost_seconds: float | None = None
    """Measured cost of one checkpoint, stall and interference together; None until it is measured. From then on it
    replaces the predicted stall."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalPlan:
    """The interval that a policy chose, with the expected consequences."""

    interval: int | None
    """Iterations between checkpoints; `None`: no checkpoints until something changes, or their number is not known
    yet."""
    interval_seconds: float | None = None
    """The interval where it is fixed in wall-clock time; `interval` is then an estimate. Otherwise `None`."""
    policy: str = "checkfreq"
    cost_seconds: float = 0.0
    """Training time that one checkpoint costs."""
    overhead: float | None = None
    """Expected (time with checkpoints / time without) - 1."""
    unsaved_iterations: int | None = None
    """Maximum iterations that one failure can lose."""
    unsaved_seconds: float | None = None
    ettr: float | None = None
    """Effective training time ratio: the expected share of time that is spent on progress which no failure undoes.
    `None` if no iteration was timed."""
    reason: str = ""
    """Why this interval, in words."""
    pending: str = ""
    """What a change of the interval waits for; empty where the measurements call for none."""

    @property
    def interval_in_force(self) -> int | timedelta | None:
        """The interval in iterations, or in time where it is fixed so."""
        return self.interval if self.interval_seconds is None else timedelta(seconds=self.interval_seconds)


def profile_to_json(profile: Profile) -> dict[str, float]:
    """Return the finite fields: JSON has no infinity, and `profile_from_json` restores defaults."""
    # dataclasses.asdict deep-copies every number, which is slow, and training waits here
    values = ((name, getattr(profile, name)) for name in Profile.__dataclass_fields__)
    return {name: value for name, value in values if value is not None and math.isfinite(value)}


def profile_from_json(saved: object) -> Profile | None:
    """Parse the result of `profile_to_json`; `None` if `saved` is not a profile."""
    if not isinstance(saved, dict):
        return None
    numbers: dict[str, Any] = {
        key: value
        for key, value in saved.items()
        if key in Profile.__dataclass_fields__ and isinstance(value, int | float)
    }
    seconds = numbers.get("iteration_seconds", math.nan)
    return Profile(**numbers) if math.isfinite(seconds) and seconds > 0 else None


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
