"""Parsers of form fields; each raises InvalidSetting with the reason."""

from __future__ import annotations

import math
from collections.abc import Callable
from urllib.parse import urlencode

from holdfast.pacing.settings import parse_budget, parse_every, parse_unsaved_work, parse_write_budget
from holdfast.protocol.orders import DataSkip
from holdfast.units import parse_seconds
from holdfast_server.core.errors import InvalidSetting

MAX_SHOWN = 40
"""Maximum number of characters of the input that an error repeats."""


def budget_from_percent(text: str) -> float:
    """Parse a percentage as a fraction."""
    try:
        return parse_budget(_cut(text).replace(",", "."), bare="percent")
    except ValueError as error:
        raise InvalidSetting("budget", _shortened(error)) from None


def write_budget(text: str) -> str | None:
    """Return a valid amount per time as it was entered; `None` without one: the script's own."""
    return _as_entered("write_budget", text, parse_write_budget)


def unsaved_work(text: str) -> str | None:
    """Return a valid time as it was entered; `None` without one: the script's own."""
    return _as_entered("max_unsaved_work", text, parse_unsaved_work)


def _as_entered(field: str, text: str, parse: Callable[[str], float]) -> str | None:
    if not text.strip():
        return None
    try:
        parse(_cut(text))
    except ValueError as error:
        raise InvalidSetting(field, str(error)) from None
    return text.strip()


def interval(text: str) -> str:
    """Return a valid interval as it was entered: a number of iterations, or a time."""
    try:
        parse_every(_cut(text))
    except ValueError as error:
        raise InvalidSetting("every", _shortened(error)) from None
    return text.strip()


def hold(text: str) -> float | None:
    """Parse how long a fixed interval applies; None until it is changed."""
    return seconds("every_seconds", text) if text.strip() else None


def labels(text: str) -> tuple[str, ...]:
    """Split labels at commas: `team: vision, sweep`."""
    return tuple(label for label in (part.strip() for part in text.split(",")) if label)


def iteration(text: str) -> int:
    """Parse an iteration of at least 1."""
    digits = text.strip().replace(",", "").replace("\u202f", "")
    # checkpoint ids have 12 digits
    if not _whole(digits, most=12) or int(digits) == 0:
        raise InvalidSetting("iteration", f"{_cut(text)!r} is not an iteration: enter a positive integer")
    return int(digits)


def data_skip(choice: str, skip_to: str, batches: str, loader: str) -> DataSkip | None:
    """Return the data that a restore is to leave out: up to an iteration, or a number of batches of a loader."""
    if choice == "skip":
        return DataSkip(to_iteration=iteration(skip_to))
    if choice != "batches":
        return None
    number, digits = loader.strip(), batches.strip().replace(",", "").replace("\u202f", "")
    if not _whole(digits, most=15) or int(digits) == 0:
        raise InvalidSetting("batches", f"{_cut(batches)!r} is not a number of batches: enter a positive integer")
    if number and not _whole(number, most=6):
        raise InvalidSetting("loader", f"{_cut(loader)!r} is not a loader number: loaders are numbered from 0")
    return DataSkip(batches=int(digits), loader=int(number) if number else None)


def plan_query(typed: dict[str, str]) -> str:
    """Return the API query string of the plan inputs; empty without inputs."""
    asked = {name: text.strip() for name, text in typed.items() if text.strip()}
    if "budget" in asked:
        asked["budget"] = asked["budget"].removesuffix("%").strip() + "%"
    return f"?{urlencode(asked)}" if asked else ""


def seconds(field: str, text: str) -> float:
    """Parse a duration such as `30 min` or `2h`; a bare number is seconds."""
    try:
        return parse_seconds(_cut(text), field)
    except ValueError as error:
        raise InvalidSetting(field, str(error)) from None


def number(field: str, text: str) -> float:
    try:
        value = float(_cut(text).replace(",", ""))
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise InvalidSetting(field, f"{field} {_cut(text)!r} is not a number")
    return value


def version(text: str) -> int:
    if not _whole(text, most=15):
        raise InvalidSetting("version", "the form is incomplete; reload the page")
    return int(text)


def _whole(digits: str, *, most: int) -> bool:
    return digits.isascii() and digits.isdigit() and len(digits) <= most


def _cut(text: str) -> str:
    text = text.strip()
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "…"


def _shortened(error: ValueError) -> str:
    return str(error).removesuffix(": write 3.5% or 0.035")
