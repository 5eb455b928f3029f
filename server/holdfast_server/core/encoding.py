"""JSON encoding of responses. Non-finite numbers become the strings "nan", "inf" and "-inf"."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec


def to_json(answer: object) -> bytes:
    return msgspec.json.encode(finite(msgspec.to_builtins(answer)))


def finite(value: Any) -> Any:
    """Replace each non-finite number by a string."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return value if _finite_numbers(value) else [finite(item) for item in value]
    return value


def _finite_numbers(values: Sequence[Any]) -> bool:
    """Return whether all values are finite numbers, as in nearly all of a timeline's columns."""
    try:
        return all(map(math.isfinite, values))
    except TypeError:
        return False
