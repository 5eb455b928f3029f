"""Types of the fields of messages, with the values that they allow.

A value that its type does not allow makes the message invalid: agent and server refuse it by the same definition
as they decode it. Three kinds of field are fitted instead, since the rest of their message is worth keeping: an
optional measurement (`Measured…`) becomes `None`, and a `Text` and a mapping lose what exceeds a limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import islice
from typing import Annotated, Any, NamedTuple, get_type_hints

from msgspec import Meta, Struct

MAX_LINEAGE = 999_999_999
"""Largest lineage number: a checkpoint id has nine digits for it."""
MAX_ATTEMPT = 2**31 - 1
MAX_ITERATION = 999_999_999_999
"""Largest iteration number: a checkpoint id has twelve digits for it."""
MAX_INTEGER = 2**53
"""Largest integer of any kind: JavaScript represents integers up to here exactly."""
MAX_ANNOTATION = 300
"""Longest text of an annotation in characters."""
TIMES_END = 253_402_300_800.0
"""Start of the year 10000, from which calendars cannot name a time."""
MAX_TENSOR_NAME = 1000  # characters
MAX_SECONDS = 1e10
MAX_HELD = 256
"""Snapshots, and parts of one, in the memory of a host: a supervisor has fewer slots."""
MAX_TEXT = 4000
"""Characters of a text."""
MAX_NAME = 200
"""Characters of a name in a mapping."""
MAX_ENTRIES = 200
"""Entries of a mapping."""
MAX_NUMBER = 1e100
"""Largest number of any kind: sums and squares of such numbers are finite."""


class Fit(NamedTuple):
    """How a field is fitted to what it may be."""

    to: Callable[[Any], Any]


class _TimeField:
    """Marks a time in seconds since the epoch."""


def is_time(at: float) -> bool:
    """Return whether seconds since the epoch are a time that a page can show."""
    return 0 <= at < TIMES_END


def is_number(value: float) -> bool:
    return abs(value) <= MAX_NUMBER


def is_duration(seconds: float) -> bool:
    return 0 <= seconds <= MAX_SECONDS


def _measured(is_valid: Callable[[float], bool]) -> Fit:
    return Fit(lambda value: value if value is None or is_valid(value) else None)


def _cut_text(text: str | None) -> str | None:
    return None if text is None else text[:MAX_TEXT]


def texts_of(most: int) -> Fit:
    """Return the fit of a mapping of texts: at most so many entries."""
    return Fit(lambda entries: {name[:MAX_NAME]: text[:MAX_TEXT] for name, text in islice(entries.items(), most)})


def _figures(entries: dict[str, float]) -> Iterator[tuple[str, float]]:
    return ((name[:MAX_NAME], value) for name, value in islice(entries.items(), MAX_ENTRIES))


Count = Annotated[int, Meta(ge=0, le=MAX_INTEGER)]
Iteration = Annotated[int, Meta(ge=0, le=MAX_ITERATION)]
Lineage = Annotated[int, Meta(ge=0, le=MAX_LINEAGE)]
Attempt = Annotated[int, Meta(ge=0, le=MAX_ATTEMPT)]
Number = Annotated[float, Meta(ge=-MAX_NUMBER, le=MAX_NUMBER)]
"""A number that can be computed with."""
Seconds = Annotated[float, Meta(ge=0, le=MAX_SECONDS)]
"""A duration."""
Time = Annotated[float, Meta(ge=0, lt=TIMES_END), _TimeField]
"""Seconds since the epoch."""
JobName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$(?!\n)")]
CheckpointId = Annotated[str, Meta(pattern=r"^[0-9]{12}-[0-9]{1,9}$(?!\n)")]

MeasuredNumber = Annotated[float | None, _measured(is_number)]
MeasuredSeconds = Annotated[float | None, _measured(is_duration)]
MeasuredTime = Annotated[float | None, _measured(is_time), _TimeField]
Text = Annotated[str, Fit(_cut_text)]
OptionalText = Annotated[str | None, Fit(_cut_text)]
TwoTexts = Annotated[list[str], Fit(lambda texts: [text[:MAX_TEXT] for text in texts[:2]])]
Texts = Annotated[dict[str, str], texts_of(MAX_ENTRIES)]
"""Texts by name."""
Figures = Annotated[dict[str, float], Fit(lambda entries: dict(_figures(entries)))]
"""Numbers by name."""
MeasuredFigures = Annotated[
    dict[str, float],
    Fit(lambda entries: {name: value for name, value in _figures(entries) if 0 <= value <= MAX_NUMBER}),
]
"""Numbers by name; one that was not measured, or that is too large, is left out."""


class RankCheckpointTimes(Struct, kw_only=True, frozen=True):
    """The times of one rank for its part of a checkpoint."""

    rank: int
    snapshot_seconds: float
    stall_seconds: float
    persist_seconds: float
    """Time to write its part, without waiting for other ranks."""

    @property
    def is_valid(self) -> bool:
        times = (self.snapshot_seconds, self.stall_seconds, self.persist_seconds)
        return 0 <= self.rank <= MAX_INTEGER and all(map(is_duration, times))


class ChangedTensor(Struct, kw_only=True, frozen=True):
    """A tensor of which an incremental checkpoint stores rows, in addition to files that it links.

    A row is what is compared as a whole: small rows are grouped, and large ones are cut into parts.
    """

    name: str
    rows: Count
    row_bytes: Count
    changed_rows: Count
    """Rows that changed since the checkpoint before."""
    stored_rows: Count
    """Rows that it wrote: those, and rows of earlier files that it does not link."""
    size_bytes: Count
    """Size of the tensor."""

    @property
    def is_valid(self) -> bool:
        return len(self.name) <= MAX_TENSOR_NAME


class HeldSnapshot(Struct, kw_only=True, frozen=True):
    """The parts of a snapshot that the memory of a host holds."""

    id: CheckpointId
    origin: Annotated[str, Meta(max_length=64)] = ""
    """Identifies who took it, and when: parts of another origin belong to another snapshot."""
    world_size: Count = 1
    ranks: Annotated[list[Count], Meta(max_length=MAX_HELD)] = []
    """Ranks whose parts these are."""


def fit(message: Struct) -> None:
    """Fit the fields of a decoded message."""
    for name, to in _fits(type(message)):
        setattr(message, name, to(getattr(message, name)))


@cache
def time_fields(kind: type[Struct]) -> frozenset[str]:
    """Return the names of the fields that are times."""
    return frozenset(name for name, mark in _marks(kind) if mark is _TimeField)


@cache
def _fits(kind: type[Struct]) -> tuple[tuple[str, Callable[[Any], Any]], ...]:
    return tuple((name, mark.to) for name, mark in _marks(kind) if isinstance(mark, Fit))


def _marks(kind: type[Struct]) -> list[tuple[str, object]]:
    hints = get_type_hints(kind, include_extras=True)
    return [(name, mark) for name in kind.__struct_fields__ for mark in getattr(hints[name], "__metadata__", ())]
