"""From what a person typed to what the server can be asked."""

from __future__ import annotations

from holdfast.pacing.settings import parse_budget, parse_every
from holdfast_server.errors import InvalidSetting

MAX_SHOWN = 40
"""Characters of what was typed that a refusal repeats."""


def budget_from_percent(text: str) -> float:
    """The fraction that a field marked % means; InvalidSetting with the reason otherwise."""
    try:
        return parse_budget(_cut(text).replace(",", "."), bare="percent")
    except ValueError as error:
        raise InvalidSetting("budget", _shortened(error)) from None


def interval(text: str) -> int:
    try:
        return parse_every(_cut(text))
    except ValueError as error:
        raise InvalidSetting("every", _shortened(error)) from None


def iteration(text: str) -> int:
    """The iteration to go back to, at least 1."""
    digits = text.strip().replace(",", "").replace("\u202f", "")
    # more digits than an id has room for cannot be one of its iterations
    if not _whole(digits, most=12) or int(digits) == 0:
        raise InvalidSetting("iteration", f"{_cut(text)!r} is not an iteration: write a whole number from 1 on")
    return int(digits)


def version(text: str) -> int:
    if not _whole(text, most=15):
        raise InvalidSetting("version", "the form is incomplete: load the page again")
    return int(text)


def _whole(digits: str, *, most: int) -> bool:
    return digits.isascii() and digits.isdigit() and len(digits) <= most


def _cut(text: str) -> str:
    text = text.strip()
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "…"


def _shortened(error: ValueError) -> str:
    return str(error).removesuffix(": write 3.5% or 0.035")
