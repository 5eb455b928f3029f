"""What an operator may set, and how what was typed becomes a number; shared by agent, server and command line."""

from __future__ import annotations

import math
from dataclasses import dataclass

from holdfast.pacing.quantities import parse_positive_seconds

DEFAULT_BUDGET = 0.035
MIN_BUDGET, MAX_BUDGET = 0.0001, 1.0
MAX_INTERVAL = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What holds for the next iterations, after orders, arguments, environment and defaults were weighed."""

    budget: float = DEFAULT_BUDGET
    """Allowed overhead: (time with checkpointing / time without) - 1."""
    policy: str = "checkfreq"
    every: int | None = None
    """An interval, in iterations, that overrides the policy."""
    paused: bool = False
    mtbf_seconds: float | None = None
    """Mean time between failures of the whole job, as it was stated; None: as clusters report it. What is
    then seen of the job corrects either."""


def parse_budget(value: float | str, *, bare: str = "fraction") -> float:
    """The budget as a fraction, from 0.035, "0.035" or "3.5%".

    Args:
        value: what was given or typed.
        bare: what a number without a % sign means, "fraction" or (in a field marked %) "percent".

    Raises:
        ValueError: not a number, or outside 0.01 % to 100 %.
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
    """An interval in iterations, at least 1; ValueError otherwise."""
    text = str(value).strip()
    try:
        every = int(text)
    except ValueError:
        raise ValueError(f"interval {text!r} is not a whole number of iterations") from None
    if not 1 <= every <= MAX_INTERVAL:
        raise ValueError(f"interval {text!r} is outside 1 to {MAX_INTERVAL} iterations")
    return every


def parse_mtbf(value: float | str) -> float:
    """A mean time between failures in seconds, from 11000, "3.1h" or "90 min"; ValueError for none above 0."""
    return parse_positive_seconds(str(value), "mtbf")


def settings_from_json(saved: object) -> Settings | None:
    """From `dataclasses.asdict`; None when it is none. Keys that are not known are ignored."""
    if not isinstance(saved, dict):
        return None
    return Settings(**{key: value for key, value in saved.items() if key in Settings.__dataclass_fields__})
