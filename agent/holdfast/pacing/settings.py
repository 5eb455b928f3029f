"""The pacing settings of a job, and the parsers of their values for agent, server and command line."""

from __future__ import annotations

import math
from dataclasses import dataclass

from holdfast.pacing.quantities import parse_positive_seconds

DEFAULT_BUDGET = 0.035
MIN_BUDGET, MAX_BUDGET = 0.0001, 1.0
MAX_INTERVAL = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class PacingSettings:
    """The settings in force: live operator settings before arguments, environment and defaults."""

    budget: float = DEFAULT_BUDGET
    """Maximum overhead: (time with checkpoints / time without) - 1."""
    policy: str = "checkfreq"
    every: int | None = None
    """Interval in iterations that overrides the policy."""
    paused: bool = False
    mtbf_seconds: float | None = None
    """Mean time between failures of the whole job; `None`: the published rate. Observed failures correct both."""


def parse_budget(value: float | str, *, bare: str = "fraction") -> float:
    """Parse a budget such as 0.035, "0.035" or "3.5%" to a fraction.

    Args:
        value: the number or text.
        bare: the meaning of a number without a % sign, "fraction" or "percent".

    Raises:
        ValueError: not a number, or not between 0.01 % and 100 %.
    """
    text = str(value).strip()
    percent = text.endswith("%")
    try:
        number = float(text.removesuffix("%"))
    except ValueError:
        raise ValueError(f"budget {text!r} is not a number: write 3.5% or 0.035") from None
    if percent or bare == "percent":
        number /= 100
    if not math.isfinite(number) or not MIN_BUDGET <= number <= MAX_BUDGET:
        hint = f"; did you mean {text}%?" if not percent and bare == "fraction" and 1 < number <= 100 else ""
        raise ValueError(f"budget {text!r} is outside 0.01% to 100% of training time{hint}")
    return number


def parse_every(value: int | str) -> int:
    """Parse an interval of at least 1 iteration; ValueError otherwise."""
    text = str(value).strip()
    try:
        every = int(text)
    except ValueError:
        raise ValueError(f"interval {text!r} is not a whole number of iterations") from None
    if not 1 <= every <= MAX_INTERVAL:
        raise ValueError(f"interval {text!r} is outside 1 to {MAX_INTERVAL} iterations")
    return every


def parse_mtbf(value: float | str) -> float:
    """Parse a mean time between failures such as 11000, "3.1h" or "90 min"; ValueError if not above 0."""
    return parse_positive_seconds(str(value), "mtbf")


def settings_from_json(saved: object) -> PacingSettings | None:
    """Restore settings from a dictionary and ignore unknown keys; `None` if `saved` is not a dictionary."""
    if not isinstance(saved, dict):
        return None
    return PacingSettings(
        **{key: value for key, value in saved.items() if key in PacingSettings.__dataclass_fields__}
    )
