"""Answers from rows, and answers as JSON, with "nan", "inf" and "-inf" for numbers that JSON cannot express."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from holdfast.protocol.field_types import time_fields

T = TypeVar("T", bound=msgspec.Struct)


def answer_from(row: object, kind: type[T], /, **others: object) -> T:
    """Make an answer from a row's attributes. `others` are the fields that the row lacks, or has in another
    form."""
    return kind(
        **{name: others[name] if name in others else getattr(row, name) for name in kind.__struct_fields__}
    )


def round_row(row: T, digits: int) -> T:
    """Round the times of a row to milliseconds, its other values to so many significant digits.

    Further digits of a measurement are noise, which cannot be compressed.
    """
    changes: dict[str, Any] = {}
    times = time_fields(type(row))
    for name in row.__struct_fields__:
        value = getattr(row, name)
        if isinstance(value, float):
            changes[name] = round(value, 3) if name in times else float(f"{value:.{digits}g}")
        elif isinstance(value, list) and value and isinstance(value[0], msgspec.Struct):
            changes[name] = [round_row(one, digits) for one in value]
    return msgspec.structs.replace(row, **changes)


def to_json(answer: object) -> bytes:
    return msgspec.json.encode(finite(msgspec.to_builtins(answer)))


def finite(value: Any) -> Any:
    """Return a copy in which every number can be expressed in JSON."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return value if _finite_numbers(value) else [finite(item) for item in value]
    return value


def _finite_numbers(values: Sequence[Any]) -> bool:
    """Return whether all are finite numbers, as in nearly all columns of a timeline, which then need no copy."""
    try:
        return all(map(math.isfinite, values))
    except TypeError:
        return False
