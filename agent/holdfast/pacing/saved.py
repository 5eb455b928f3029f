"""A profile and settings as JSON, in a checkpoint, and back."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

from .profile import Profile
from .settings import Settings

# `dataclasses.asdict` copies even a number by way of `copy.deepcopy`, and training waits for it
_FIELDS = tuple(each.name for each in fields(Profile))
_SETTINGS = tuple(each.name for each in fields(Settings))


def to_json(profile: Profile) -> dict[str, float]:
    """What is known of it: JSON has no infinity, and the fields left out have their defaults back when read."""
    values = ((name, getattr(profile, name)) for name in _FIELDS)
    return {name: value for name, value in values if value is not None and math.isfinite(value)}


def from_json(saved: object) -> Profile | None:
    """None when it is no profile."""
    if not isinstance(saved, dict):
        return None
    numbers: dict[str, Any] = {
        key: value for key, value in saved.items() if key in _FIELDS and isinstance(value, int | float)
    }
    seconds = numbers.get("iteration_seconds", math.nan)
    return Profile(**numbers) if math.isfinite(seconds) and seconds > 0 else None


def settings_to_json(settings: Settings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in _SETTINGS}


def settings_from_json(saved: object) -> Settings | None:
    """None when it is none. What an older version did not know has its default."""
    if not isinstance(saved, dict):
        return None
    return Settings(**{key: value for key, value in saved.items() if key in _SETTINGS})
