"""Answers as JSON. Numbers that JSON has no word for are the strings "nan", "inf" and "-inf"."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec


def to_json(answer: object) -> bytes:
    return msgspec.json.encode(finite(msgspec.to_builtins(answer)))


def finite(value: Any) -> Any:
    """A copy in which every number is one that JSON can write."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return value if _finite_numbers(value) else [finite(item) for item in value]
    return value


def _finite_numbers(values: Sequence[Any]) -> bool:
    """Whether nothing needs to be changed, as in nearly all columns: a timeline has thousands of numbers."""
    try:
        return all(map(math.isfinite, values))
    except TypeError:
        return False
