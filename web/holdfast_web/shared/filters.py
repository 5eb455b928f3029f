"""Template filters that format values with their units. Pure functions."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from datetime import UTC, datetime

from holdfast import units
from holdfast.protocol import account
from holdfast.protocol.account import LossCause
from holdfast.protocol.analyses import category_of
from holdfast.protocol.field_types import is_time
from holdfast.protocol.ids import parse_checkpoint_id
from holdfast.protocol.jobs import CheckpointInfo
from holdfast.units import FixedInterval, format_interval, format_rate

NONE = "–"
MAX_SIZE = 10**21
"""Bytes, or bytes per second, from which on a figure is absurd."""


def _significant(value: float, digits: int = 3) -> str:
    """Format with about `digits` significant digits, and without an exponent unless the figure is absurd."""
    if value == 0:
        return "0"
    if not 1e-12 <= abs(value) < 1e15:
        return f"{value:.{digits - 1}e}"
    rounded = float(f"{value:.{digits - 1}e}")  # 0.9996 is 1.00, not 1.000
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(rounded))))
    return f"{value:,.{decimals}f}"


def count(value: int | None) -> str:
    return NONE if value is None else f"{value:,}"


def checkpoint_iteration(checkpoint: str) -> int:
    return parse_checkpoint_id(checkpoint)[0]


def pin_reason(point: CheckpointInfo) -> str:
    return f"Kept for {point.pinned_by}" if point.is_kept_for_alert else f"Pinned by {point.pinned_by}"


def plural(value: int, noun: str, many: str | None = None) -> str:
    return f"{value:,} {noun if value == 1 else many or noun + 's'}"


def iterations(value: int | None) -> str:
    return NONE if value is None else plural(value, "iteration")


def interval(value: FixedInterval | None) -> str:
    """Format the interval between checkpoints: `50 iterations`, `10 min`."""
    return NONE if value is None else format_interval(value)


def duration(seconds: float | None) -> str:
    """Format a time as `units.duration` does; a dash for none, or an absurd one."""
    return NONE if seconds is None or 1e15 < abs(seconds) < math.inf else units.duration(seconds)


def age(seconds: float | None) -> str:
    if seconds is None:
        return "never"
    if not math.isfinite(seconds):
        return units.non_finite(seconds)
    if seconds < 1.5:
        return "just now"
    return f"{seconds:.0f} s ago" if seconds < 59.5 else f"{duration(float(round(seconds)))} ago"


def percent(fraction: float | None) -> str:
    return NONE if fraction is None else units.percent(fraction)


def share(fraction: float | None) -> str:
    return NONE if fraction is None else units.share(fraction)


def amount(value: float | None) -> str:
    """Format with three significant digits: `3,984`, `48.6`, `0.12`."""
    if value is None:
        return NONE
    if not math.isfinite(value):
        return units.non_finite(value)
    return "<0.01" if 0 < value < 0.01 else _significant(value)


def gpu_hours(value: float | None) -> str:
    """Format GPU-hours; below 0.01 as GPU-seconds."""
    if value is None:
        return NONE
    if value == 0:
        return "nothing"
    return f"{amount(value * 3600)} GPU-s" if 0 < value < 0.01 else f"{amount(value)} GPU-h"


def money(amount: float, currency: str) -> str:
    return account.money(amount, currency)


def worst_causes(hours: Mapping[LossCause, float], most: int = 2) -> list[tuple[LossCause, float]]:
    """Return the causes with the most lost GPU-hours, the worst first."""
    known = [(cause, lost) for cause, lost in hours.items() if lost > 0]
    return sorted(known, key=lambda item: -item[1])[:most]


def speed(size_bytes: int, seconds: float | None) -> str:
    """Format the rate at which bytes were written, as `123 MB/s`."""
    if not seconds or not 0 <= size_bytes / seconds < MAX_SIZE:
        return NONE
    return f"{size(round(size_bytes / seconds))}/s"


def size(value: int | None) -> str:
    return NONE if value is None or not 0 <= value < MAX_SIZE else units.format_bytes(value)


def rate_of_bytes(bytes_per_second: float | None) -> str:
    """Format as `123 MB/s`."""
    if not bytes_per_second or not 0 < bytes_per_second < MAX_SIZE:
        return NONE
    return f"{size(round(bytes_per_second))}/s"


def rate(per_second: float | None) -> str:
    """Format as `4.1 iterations/s`, or below one per second as `12 s/iteration`."""
    if per_second is None or per_second <= 0 or not math.isfinite(per_second):
        return NONE
    if per_second < 1:
        return f"{duration(1 / per_second)}/iteration"
    return f"{_significant(per_second)} iterations/s"


def metric(value: float | None) -> str:
    """Format a metric; NaN and infinities are named."""
    if value is None:
        return NONE
    if not math.isfinite(value):
        return units.non_finite(value)
    if value != 0 and (abs(value) < 1e-4 or abs(value) >= 1e7):
        return f"{value:.3e}"
    return f"{value:.5g}"


def clock(at: float | None) -> str:
    return _formatted(at, "%H:%M:%S")


def stamp(at: float | None) -> str:
    return _formatted(at, "%Y-%m-%d %H:%M:%S UTC")


def iso(at: float | None) -> str:
    return _formatted(at, "%Y-%m-%dT%H:%M:%S+00:00")


def day(at: float | None) -> str:
    return _formatted(at, "%Y-%m-%d")


def facts(text: str | None) -> str:
    """Format a JSON object of the audit log as `name ada, role viewer`."""
    if text is None:
        return ""
    parsed = json.loads(text)
    return (
        ", ".join(f"{name} {_fact(value)}" for name, value in parsed.items()) if isinstance(parsed, dict) else text
    )


_BROWSERS = ("Firefox", "Edg", "OPR", "Chrome", "Safari", "curl", "Python")
_SYSTEMS = ("Android", "iPhone", "iPad", "Windows", "Mac OS X", "Linux")
_NICKNAMES = {"Edg": "Edge", "OPR": "Opera", "Mac OS X": "macOS"}


def browser(agent: str) -> str:
    """Return the browser and the system of a User-Agent header, such as `Firefox on Linux`."""
    name, system = (next((one for one in known if one in agent), "") for known in (_BROWSERS, _SYSTEMS))
    words = [_NICKNAMES.get(word, word) for word in (name, system) if word]
    return " on ".join(words) or agent[:40] or "unknown"


def _fact(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return "; ".join(_fact(one) for one in value)
    if isinstance(value, dict):
        return " ".join(f"{name} {_fact(one)}" for name, one in value.items())
    return "none" if value is None else str(value)


def _formatted(at: float | None, form: str) -> str:
    return datetime.fromtimestamp(at, UTC).strftime(form) if at is not None and is_time(at) else NONE


def polyline(values: list[float], width: int, height: int) -> str:
    """Return the points of an SVG polyline through the finite values, scaled to the box."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2:
        return ""
    low, high = min(finite), max(finite)
    # keep a nearly constant line in the middle instead of scaling up its noise
    span = max(high - low, abs(high) * 0.2, 1e-12)
    middle = (high + low) / 2
    step = width / (len(values) - 1)
    return " ".join(
        f"{index * step:.1f},{height / 2 - (value - middle) / span * (height - 2):.1f}"
        for index, value in enumerate(values)
        if math.isfinite(value)
    )


FILTERS = {
    function.__name__: function
    for function in (
        age, amount, browser, category_of, checkpoint_iteration, clock, count, day, duration, facts, gpu_hours,
        interval, iso, iterations, metric, money, percent, pin_reason, plural, polyline, rate, rate_of_bytes,
        share, size, speed, stamp, format_rate, worst_causes,
    )
}  # fmt: skip
