"""Parsers and formats of sizes, rates, counts, shares, times and intervals: `6.5GB`, `2TB/day`, `405B`, `2h30min`.

Each parser takes the name of the value, and raises a ValueError with that name, the text and what to write.
"""

from __future__ import annotations

import math
import re
from datetime import timedelta

_NUMBER = re.compile(r"\s*([+-]?(?:\d[\d_,]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(\D*?)\s*")
_TIMES = {
    "": 1.0, "s": 1.0, "sec": 1.0, "second": 1.0, "seconds": 1.0, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "m": 60.0,
    "min": 60.0, "minute": 60.0, "minutes": 60.0, "h": 3600.0, "hour": 3600.0, "hours": 3600.0, "d": 86400.0,
    "day": 86400.0, "days": 86400.0,
}  # fmt: skip
_TIME_PART = re.compile(
    rf"\d{{1,30}}(?:\.\d{{1,30}})?\s{{0,30}}(?:{'|'.join(sorted(filter(None, _TIMES), key=len)[::-1])})",
    re.IGNORECASE,
)
_TIME_OF_PARTS = re.compile(rf"\s*(?:{_TIME_PART.pattern}\s*){{2,}}", re.IGNORECASE)
"""A time of several numbers, each with its unit: `2h30min`."""
_DECIMAL = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15}
_SIZES = {f"{prefix}b": factor for prefix, factor in _DECIMAL.items()} | {
    f"{prefix}ib": 1024.0**power for power, prefix in enumerate("kmgtp", start=1)
}
_SIZE_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_DURATIONS = ((86400.0, "d", 3600.0, "h"), (3600.0, "h", 60.0, "min"), (60.0, "min", 1.0, "s"))
_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "bn": 1e9, "t": 1e12}
MAX_SECONDS = 100 * 365 * 86400.0
MAX_BYTES = 1e18
FixedInterval = int | timedelta
"""An interval that overrides the policy: a number of iterations, or wall-clock time."""


def parse_seconds(text: str, name: str) -> float:
    """Parse `250ms`, `2.5s`, `3 min`, `2h30min` or `2 days`; a bare number is in seconds."""
    text = str(text)
    parts = _TIME_PART.findall(text) if _TIME_OF_PARTS.fullmatch(text) else [text]
    what = "a time: write 2.5s, 3min or 2h30min"
    seconds = sum(_parse(part, name, _TIMES, what, typed=text) for part in parts)
    if not 0 <= seconds <= MAX_SECONDS:
        raise ValueError(f"{name} {text!r} is outside 0 s to 100 years")
    return seconds


def parse_positive_seconds(text: str, name: str) -> float:
    """Parse a time greater than 0."""
    seconds = parse_seconds(text, name)
    if seconds == 0:
        raise ValueError(f"{name} {text!r} must be greater than 0: write 2.5s, 3min or 2h30min")
    return seconds


def parse_bytes(text: str, name: str) -> float:
    """Parse a size greater than 0, such as `6.5GB` or `512 MiB`."""
    return _positive(_parse(text, name, _SIZES, "a size: write 6.5GB or 512MiB"), text, name)


def format_bytes(size_bytes: float) -> str:
    """Format a size with up to three digits and a decimal unit: `999 B`, `1.5 kB`, `64.4 GB`."""
    value, unit = float(size_bytes), _SIZE_UNITS[0]
    for larger in _SIZE_UNITS[1:]:
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    return f"{_short(value, 3)} {unit}"


def parse_speed(text: str, name: str) -> float:
    """Parse a speed greater than 0, such as `2GB/s`, in bytes per second."""
    stem = re.sub(r"\s*/\s*s(ec)?\s*$", "", str(text))
    return _positive(_parse(stem, name, _SIZES, "a speed: write 2GB/s or 800MB/s", typed=text), text, name)


def parse_rate(text: str, name: str) -> float:
    """Parse an amount per time greater than 0, such as `2TB/day` or `500GB/h`, in bytes per second.

    A bare number is in bytes per second.
    """
    what = "an amount per time: write 2TB/day, 500GB/h or 30MB/s"
    amount, slash, unit = str(text).partition("/")
    unit_seconds = _TIMES.get(unit.strip().lower()) if slash else 1.0
    if unit_seconds is None or (slash and not unit.strip()):
        raise ValueError(f"{name} {text!r} is not {what}")
    units = _SIZES | {"": 1.0} if slash else {"": 1.0}  # 2TB without a time is hardly meant per second
    return _positive(_parse(amount, name, units, what, typed=text), text, name) / unit_seconds


def format_rate(bytes_per_second: float) -> str:
    """Format an amount per time by the day, or by the second from 1 GB/s on."""
    is_fast = bytes_per_second >= 1e9
    per_unit = round(bytes_per_second if is_fast else bytes_per_second * _TIMES["day"])
    return f"{format_bytes(per_unit)}/{'s' if is_fast else 'day'}"


def format_exact_rate(bytes_per_second: float) -> str:
    """Format an amount per day so that `parse_rate` reads the same back."""
    a_day = bytes_per_second * _TIMES["day"]
    unit, size = next((each for each in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)) if a_day >= each[1]), ("B", 1.0))
    return f"{a_day / size:.12g}{unit}/day"


def parse_count(text: str, name: str) -> float:
    """Parse a number greater than 0, such as `405B`, `124M` or `16384`."""
    return _positive(_parse(text, name, _COUNTS, "a number: write 124M, 7B or 405e9"), text, name)


def _parse(text: str, name: str, units: dict[str, float], what: str, typed: str | None = None) -> float:
    match = _NUMBER.fullmatch(text)
    factor = units.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ValueError(f"{name} {text if typed is None else typed!r} is not {what}")
    return float(match[1].replace(",", "").replace("_", "")) * factor


def _positive(value: float, text: str, name: str) -> float:
    if value <= 0:
        raise ValueError(f"{name} {text!r} must be greater than 0")
    if not math.isfinite(value) or value > MAX_BYTES:
        raise ValueError(f"{name} {text!r} is too large")
    return value


def _short(value: float, digits: int) -> str:
    """Format with up to `digits` significant digits, without zeros at the end."""
    return f"{float(f'{value:.{digits - 1}e}'):,.12g}"


def non_finite(value: float) -> str:
    """Name a number that is none, or that is not finite."""
    return "NaN" if math.isnan(value) else ("∞" if value > 0 else "−∞")


def percent(fraction: float) -> str:
    """Format with three digits, and at most two decimals below 0.01 %: `2.81 %`."""
    if not math.isfinite(fraction):
        return non_finite(fraction)
    value = fraction * 100
    if value == 0 or abs(value) >= 100:
        return f"{value:.0f} %"
    return f"{value:.3g} %" if abs(value) >= 0.01 else f"{value:.2f} %"


def share(fraction: float) -> str:
    """Format a share of the whole; near 100 % with enough digits to separate 99.86 % from 99.91 %."""
    if not math.isfinite(fraction):
        return non_finite(fraction)
    if 0.99995 <= fraction < 1:
        return ">99.99 %"
    return f"{fraction * 100:.2f} %" if 0.99 <= fraction < 1 else f"{fraction * 100:.1f} %"


def exact_percent(fraction: float) -> str:
    """Format a setting, without rounding it to three digits: `3.125 %`."""
    return f"{round(fraction * 100, 4):g} %"


def duration(seconds: float) -> str:
    """Format a time for people: `1.2 µs`, `38 ms`, `4.1 s`, `3 min 20 s`, `2 h 5 min`, `3 d 4 h`."""
    if not math.isfinite(seconds):
        return non_finite(seconds)
    size = abs(seconds)
    if size == 0:
        return "0 s"
    if size < 0.9995e-3:
        return f"{_short(seconds * 1e6, 2)} µs"
    if size < 0.9995:
        return f"{_short(seconds * 1e3, 3 if size >= 0.1 else 2)} ms"
    if size < 59.95:
        return f"{float(f'{seconds:.1f}'):g} s"
    for unit, name, part, part_name in _DURATIONS:
        # round first: 1 min 59.7 s is 2 min, not 1 min 60 s
        parts = round(size / part)
        if size >= unit * 0.999 and parts * part >= unit:
            whole, rest = divmod(parts, round(unit / part))
            return f"{whole:,} {name}" + (f" {rest} {part_name}" if rest else "")
    return f"{seconds:.0f} s"


def format_interval(every: FixedInterval) -> str:
    """Format exactly: `50 iterations`, `2 h 30 min`. `parse_every` reads a time back."""
    if isinstance(every, int):
        return format_iterations(every)
    minutes, seconds = divmod(every, timedelta(minutes=1))
    parts = [f"{count} {unit}" for count, unit in zip(divmod(minutes, 60), ("h", "min"), strict=True) if count]
    if seconds or not parts:
        parts.append(f"{seconds.total_seconds():.6f}".rstrip("0").rstrip(".") + " s")
    return " ".join(parts)


def format_iterations(iterations: int) -> str:
    return "1 iteration" if iterations == 1 else f"{iterations:,} iterations"
