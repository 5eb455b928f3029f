"""What a policy decides from: the measured costs of an iteration and of a checkpoint."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

SnapshotMode = Literal["cpu", "gpu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The quantities of CheckFreq (Mohan, Phanishayee, Chidambaram, FAST'21, 4.2), in seconds and bytes."""

    iteration_seconds: float
    """Ti: one iteration with no checkpoint in flight."""
    update_seconds: float = 0.0
    """Tw: the optimizer's step, during which parameters change."""
    snapshot_seconds: float = 0.0
    """Tc: copying the state to host memory."""
    device_copy_seconds: float = math.inf
    """Tg: copying it within device memory; infinite where there is no device."""
    persist_seconds: float = 0.0
    """Ts: from host memory to durable, with `in_flight` under way at the same time."""
    in_flight: int = 1
    """N: how many checkpoints may be under way at the same time."""
    checkpoint_bytes: int = 0
    """m."""
    memory_used_bytes: int = 0
    """M: peak use of device memory."""
    memory_total_bytes: int = 0
    """Mmax."""
    cost_seconds: float | None = None
    """Measured price of one checkpoint, stall and interference together; None until it was measured.
    It takes the place of the predicted stall as soon as it is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A policy's answer, with what it expects of it."""

    interval: int | None
    """Iterations between checkpoints; None: none until something changes."""
    policy: str = "checkfreq"
    cost_seconds: float = 0.0
    """What one checkpoint is expected to cost training."""
    overhead: float | None = None
    """Expected overhead at this interval."""
    exposure_iterations: int | None = None
    """Most iterations that a failure can lose: up to k since the last snapshot and the persist still under way."""
    exposure_seconds: float | None = None
    effective: float | None = None
    """Expected share of time that moves training forward and is not lost again (ETTR), for the failure rate that
    is known or assumed; None where nothing was timed."""
    in_flight: int = 1
    """Checkpoints under way at once, at most."""
    reason: str = ""
    """Why this interval, in words."""
    pending: str = ""
    """Why the interval stays although the measured overhead is over the budget; empty where it is not."""


def to_json(profile: Profile) -> dict[str, float]:
    """What is known of it: JSON has no infinity, and the fields left out have their defaults back when read."""
    # not `dataclasses.asdict`, which copies even a number by way of `copy.deepcopy`, while training waits
    values = ((name, getattr(profile, name)) for name in Profile.__dataclass_fields__)
    return {name: value for name, value in values if value is not None and math.isfinite(value)}


def from_json(saved: object) -> Profile | None:
    """None when it is no profile."""
    if not isinstance(saved, dict):
        return None
    numbers: dict[str, Any] = {
        key: value
        for key, value in saved.items()
        if key in Profile.__dataclass_fields__ and isinstance(value, int | float)
    }
    seconds = numbers.get("iteration_seconds", math.nan)
    return Profile(**numbers) if math.isfinite(seconds) and seconds > 0 else None
