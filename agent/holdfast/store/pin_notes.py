"""How notes of pins are named. Each is written once, under a name of its own; the newest counts, others may go.

    <job>/pins/<attempt, 8 digits>-<turn, 6 digits>.json

A note of an older attempt that arrives late sorts before those of newer ones: it takes nothing back.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from holdfast.protocol import MAX_ATTEMPT

PINS = "pins"
_NOTE = re.compile(r"([0-9]{8,})-([0-9]{6,})\.json")


def in_order(names: Iterable[str]) -> list[str]:
    """The notes among the names of files, the newest last; first those of attempts that there can be none of."""
    found = [(int(match[1]), int(match[2]), match[0]) for match in map(_NOTE.fullmatch, names) if match]
    return [name for _, _, name in sorted(found, key=lambda each: (each[0] <= MAX_ATTEMPT, each))]


def following(names: Iterable[str], attempt: int) -> str:
    """The name of an attempt's next note."""
    turns = [int(match[2]) for match in map(_NOTE.fullmatch, names) if match and int(match[1]) == attempt]
    return f"{attempt:08d}-{max(turns, default=0) + 1:06d}.json"
