"""From what a person typed to what the server can be asked."""

from __future__ import annotations

from holdfast.pacing.settings import parse_budget, parse_every
from holdfast_server.errors import InvalidSetting


def budget_from_percent(text: str) -> float:
    """The fraction that a field marked % means; InvalidSetting with the reason otherwise."""
    try:
        return parse_budget(text.replace(",", "."), bare="percent")
    except ValueError as error:
        raise InvalidSetting("budget", _shortened(error)) from None


def interval(text: str) -> int:
    try:
        return parse_every(text)
    except ValueError as error:
        raise InvalidSetting("every", _shortened(error)) from None


def iteration(text: str) -> int:
    """The iteration to go back to, at least 1."""
    digits = text.strip().replace(",", "").replace("\u202f", "")
    # more digits than an id has room for cannot be one of its iterations
    if not digits.isascii() or not digits.isdigit() or not 0 < int(digits) < 10**12:
        raise InvalidSetting("iteration", f"{text.strip()!r} is not an iteration: write a whole number from 1 on")
    return int(digits)


def version(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise InvalidSetting("version", "the form is incomplete: load the page again")
    return int(text)


def _shortened(error: ValueError) -> str:
    return str(error).removesuffix(": write 3.5% or 0.035")
