"""Rules of the values that a script allows, shared by agent and server."""

from __future__ import annotations

import math
import re

import msgspec

from holdfast.protocol.field_types import MAX_INTEGER, MAX_NUMBER
from holdfast.protocol.values import MAX_CHOICE, MAX_CHOICES, NAME, Scalar, ValueDefinition, ValueKind

KINDS: dict[ValueKind, str] = {
    "float": "a number", "int": "a whole number", "bool": "true or false", "text": "a text",
}  # fmt: skip
_BOOLEANS = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}


def parsed(definition: ValueDefinition, value: object) -> Scalar:
    """Return a value of this kind, within the bounds; a text is parsed. ValueError says why it is refused."""
    found, name = _of_kind(definition, value), definition.name
    if definition.choices and found not in definition.choices:
        raise ValueError(f"{name} is one of {', '.join(map(str, definition.choices))}, not {found}")
    if isinstance(found, str | bool):
        return found
    low, high = definition.low, definition.high
    if (low is not None and found < low) or (high is not None and found > high):
        raise ValueError(f"{name} is {bounds(definition)}, not {found:g}")
    return found


def bounds(definition: ValueDefinition) -> str:
    """Return the bounds as text; empty without any."""
    low, high = definition.low, definition.high
    if low is not None and high is not None:
        return f"{low:g} to {high:g}"
    return f"at least {low:g}" if low is not None else f"at most {high:g}" if high is not None else ""


def shown(value: Scalar | None, default: Scalar | None = None) -> str:
    """Return a value as text."""
    if value is None:
        return "the script's" if default is None else f"{shown(default)} (script)"
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def define(
    name: str, default: Scalar, low: float | None, high: float | None, choices: tuple[Scalar, ...]
) -> ValueDefinition:
    """Return the definition of a value, which has the kind of its default. ValueError: it is invalid."""
    kinds: dict[type, ValueKind] = {bool: "bool", int: "int", float: "float", str: "text"}
    if not re.match(NAME, name):
        raise ValueError(f"a name has up to 64 letters, digits, _, - and ., and a letter first, not {name!r}")
    if (kind := kinds.get(type(default))) is None:
        raise ValueError(f"{name} is a number, a boolean or a text, not {type(default).__name__}")
    if (low is not None or high is not None) and (kind in ("bool", "text") or choices):
        raise ValueError(f"{name} has choices or is no number, so it has no bounds")
    if kind == "text" and not choices:
        raise ValueError(f"{name} is a text: give its choices")
    if kind == "bool" and choices:
        raise ValueError(f"{name} is a boolean, which has no choices")
    if low is not None and high is not None and not low < high:
        raise ValueError(f"the lower bound of {name} is not below the upper one")
    if len(choices) > MAX_CHOICES or any(len(str(each)) > MAX_CHOICE for each in choices):
        raise ValueError(f"{name} has more than {MAX_CHOICES} choices, or one over {MAX_CHOICE} characters")
    definition = ValueDefinition(
        name=name, kind=kind, default=default, low=_number(low), high=_number(high), choices=choices
    )
    allowed = tuple(parsed(definition, each) for each in (default, *choices))
    return msgspec.structs.replace(definition, default=allowed[0], choices=allowed[1:])


def _number(bound: float | None) -> float | None:
    return None if bound is None else float(bound)


def _of_kind(definition: ValueDefinition, value: object) -> Scalar:
    kind = definition.kind
    wrong = ValueError(f"{definition.name} is {KINDS[kind]}, not {value!r}")
    if kind == "text":
        if not isinstance(value, str):
            raise wrong
        return value
    if kind == "bool":
        known = _BOOLEANS.get(value.strip().lower()) if isinstance(value, str) else value
        if not isinstance(known, bool):
            raise wrong
        return known
    if not isinstance(value, int | float | str) or isinstance(value, bool):
        raise wrong
    try:
        number = float(value)
    except (ValueError, OverflowError):
        raise wrong from None
    if not math.isfinite(number) or abs(number) > MAX_NUMBER:
        raise wrong
    if kind == "float":
        return number
    if not number.is_integer() or abs(number) > MAX_INTEGER:
        raise wrong
    return int(number)
