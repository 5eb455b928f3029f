"""Answers as JSON. Numbers that JSON has no word for are the strings "nan", "inf" and "-inf"."""

from __future__ import annotations

import math
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
        return [finite(item) for item in value]
    return value
