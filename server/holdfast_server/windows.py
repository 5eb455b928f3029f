"""The stretches of time that a question may be about."""

from __future__ import annotations

from holdfast.answers import ShortWindow, Window

"""For questions about each of a thousand ranks."""

SECONDS: dict[str, float] = {"10m": 600.0, "1h": 3600.0, "24h": 86400.0, "7d": 604800.0}


def begin_of(window: Window | ShortWindow, *, now: float) -> float:
    """When it begins; 0 for all time."""
    return now - SECONDS[window] if window in SECONDS else 0.0
