"""The pacing settings of a job, and the parsers of their values for agent, server and command line."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from datetime import timedelta

from holdfast.units import MAX_SECONDS, FixedInterval, parse_positive_seconds, parse_rate, parse_seconds

DEFAULT_BUDGET = 0.035
DEFAULT_POLICY = "goodput"
DEFAULT_UNSAVED_SECONDS = 600.0
DAY = 86400.0
LEAST_WRITE_BUDGET = 2e12 / DAY
"""The default write budget of a small state, in bytes per second: 2 TB a day."""
STATES_A_DAY = 2000
"""The default write budget of a larger one, in states a day: one every 43 s."""
MIN_BUDGET, MAX_BUDGET = 0.0001, 1.0
MAX_INTERVAL = 10**9
MIN_INTERVAL_SECONDS = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class PacingSettings:
    """The settings in force: live operator settings before arguments, environment and defaults."""

    budget: float = DEFAULT_BUDGET
    """Maximum overhead: (time with checkpoints / time without) - 1."""
    policy: str = DEFAULT_POLICY
    every: FixedInterval | None = None
    """Interval that overrides the policy. A time begins with each checkpoint, and ends at the first boundary after
    it."""
    paused: bool = False
    write_bytes_per_second: float | None = None
    """Maximum mean rate of what is sent to the store; `None`: 2 TB or 2,000 states a day, whichever is more."""
    max_unsaved_seconds: float = DEFAULT_UNSAVED_SECONDS
    """Work that a failure may lose, as far as both budgets allow."""
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


def parse_every(value: FixedInterval | str) -> FixedInterval:
    """Parse an interval: 50 iterations, or a time such as "10min" or "2h30min". ValueError if it is neither."""
    if isinstance(value, timedelta):
        return interval_time(value.total_seconds())
    text = str(value).strip()
    if text[-1:].isalpha():
        with contextlib.suppress(ValueError):
            return interval_time(parse_seconds(text, "interval"))
    try:
        every = int(text)
    except ValueError:
        raise ValueError(
            f"interval {text!r} is not a whole number of iterations, nor a time above 0 with its unit: "
            "write 50 or 10min"
        ) from None
    if not 1 <= every <= MAX_INTERVAL:
        raise ValueError(f"interval {text!r} is outside 1 to {MAX_INTERVAL} iterations")
    return every


def interval_time(seconds: float) -> timedelta:
    """Return an interval in wall-clock time; ValueError if it is not above 0, or longer than 100 years."""
    if not MIN_INTERVAL_SECONDS <= seconds <= MAX_SECONDS:
        raise ValueError(f"an interval of {seconds:g} s is outside 1 ms to 100 years")
    return timedelta(seconds=seconds)


def interval_iterations(every: FixedInterval, iteration_seconds: float) -> int:
    """Return the number of iterations that an interval takes, at least 1."""
    if isinstance(every, int):
        return max(1, every)
    iterations = every.total_seconds() / iteration_seconds * (1 - 1e-12)
    return max(1, math.ceil(min(iterations, MAX_INTERVAL)))


def parse_mtbf(value: float | str) -> float:
    """Parse a mean time between failures such as 11000, "3.1h" or "90 min"; ValueError if not above 0."""
    return parse_positive_seconds(str(value), "mtbf")


def parse_write_budget(value: float | str) -> float:
    """Parse a rate such as "2TB/day" or "500GB/h" to bytes per second; ValueError if not above 0."""
    return parse_rate(f"{value:.15g}" if isinstance(value, int | float) else value, "write_budget")


def parse_unsaved_work(value: float | str) -> float:
    """Parse the unsaved work that is accepted, such as 600 or "10min", to seconds; ValueError if not above 0."""
    text = f"{value:.15g}" if isinstance(value, int | float) else value
    return parse_positive_seconds(text, "max_unsaved_work")


def settings_to_json(settings: PacingSettings) -> dict[str, object]:
    """Return the settings as JSON types: an interval in wall-clock time is in `interval_seconds`."""
    values: dict[str, object] = {name: getattr(settings, name) for name in PacingSettings.__dataclass_fields__}
    if isinstance(settings.every, timedelta):
        values |= {"every": None, "interval_seconds": settings.every.total_seconds()}
    return values
