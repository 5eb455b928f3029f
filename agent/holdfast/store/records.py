"""Records of jobs: small, written once, never changed. What all stores do with them in the same way.

<job>/attempts/   one for each start; the highest number may write
<job>/endings/    how an attempt ended, where it could say so
<job>/lineages/   where each line of iterations began
<job>/pins/       <attempt, 8 digits>-<turn, 6 digits>.json: only the newest note counts. One of an older
                  attempt that arrives late sorts before those of newer ones, and takes nothing back
<job>/holds/      a checkpoint that is being copied
"""

from __future__ import annotations

import contextlib
import errno
import logging
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import msgspec

from holdfast.protocol.messages import (
    MAX_ATTEMPT,
    MAX_ITERATION,
    MAX_LINEAGE,
    Origin,
    is_checkpoint_id,
    parse_checkpoint_id,
)

if TYPE_CHECKING:
    from holdfast.store.base import Store

logger = logging.getLogger("holdfast")

ASKED_FOR = 8
"""So many of the newest checkpoints that somebody asked for by hand outlive retention."""
HOLD_SECONDS = 86400.0
"""A copy takes no longer: whoever had begun it has died."""
UNDOABLE = 3
"""So many of the last restores can be undone: what they left outlives retention."""
NO_RECORD = (errno.ENXIO, errno.EFBIG)
"""What is read in place of a record is something else."""


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One start of a job's processes; the highest number is the one that may commit."""

    number: int
    uid: str
    host: str
    pid: int
    started_at: float
    order: str | None = None
    """The restore order that was open when it began, noted before anything is done about it."""


class Lineage(msgspec.Struct, frozen=True, kw_only=True):
    """A line of iterations, noted durably before the first of them is trained."""

    number: int
    iteration: int
    """The iteration that it begins after: 0, or that of the checkpoint restored."""
    parent: str | None
    """The checkpoint restored; None for a fresh start."""
    order: str | None
    """The restore order that began it, so that no crash makes the order act twice."""
    attempt: int
    created_at: float
    left: str | None = None
    """The safety checkpoint of the state that was left for it: the way back."""
    origin: Origin | None = None
    """Of the first lineage of a fork: the checkpoint of another job that `parent` is a copy of."""


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """How an attempt ended, in its own words; one that was killed says nothing."""

    attempt: int
    reason: str
    """`finished`, `interrupted` or the exception that ended the loop."""
    iterations: int
    """How many it had trained."""
    at: float


class Pins(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoints that people keep, as an attempt was last told: retention leaves them."""

    attempt: int
    checkpoints: tuple[str, ...]
    at: float


class Hold(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that somebody copies just now: retention waits with it."""

    uid: str
    checkpoint: str
    at: float

    @property
    def name(self) -> str:
        return f"{FOLDERS[Hold]}/{self.uid}.json"


Record = Attempt | Lineage | Ending | Pins | Hold
R = TypeVar("R", bound=msgspec.Struct)

FOLDERS: dict[type[Any], str] = {
    Attempt: "attempts", Ending: "endings", Lineage: "lineages", Pins: "pins", Hold: "holds",
}  # fmt: skip
_MOST: dict[type[Any], int] = {Attempt: MAX_ATTEMPT, Ending: MAX_ATTEMPT, Lineage: MAX_LINEAGE, Hold: 0}
PATTERNS: dict[type[Any], re.Pattern[str]] = {
    Ending: re.compile(r"([0-9]{8,})\.json"),
    Pins: re.compile(r"([0-9]{8,})-([0-9]{6,})\.json"),
    Hold: re.compile(r"().+\.json"),
}
"""Of names within a folder, the same in all stores; the first group is the number."""


class RecordName(msgspec.Struct, frozen=True, kw_only=True):
    """A record as its name gives it. Somebody else may have written it: the number may be out of range."""

    name: str
    kind: Literal["attempt", "ending", "lineage"]
    number: int
    is_needed: bool = False
    """The store cannot manage its checkpoints without this record."""


class RecordStore(ABC):
    """Records over what a store can do with small named files, and how it fences."""

    url: str
    patterns: ClassVar[Mapping[type[Any], re.Pattern[str]]]
    """Of the names within a folder, by kind."""

    @abstractmethod
    def read_record(self, job: str, name: str) -> bytes:
        """OSError where there is none, or something else in its place."""

    @abstractmethod
    def fenced(self, job: str, attempt: int) -> AbstractContextManager[None]:
        """Fenced where `attempt` is not the job's newest, or is not any more when what is done inside counts."""

    @abstractmethod
    def _record_files(self, job: str, folder: str) -> Iterable[str]:
        """The names in a folder."""

    @abstractmethod
    def _record_name(self, record: Attempt | Lineage) -> str:
        """Within its folder."""

    @abstractmethod
    def _create_record(self, job: str, name: str, data: bytes) -> None:
        """Create it durably, whole or not at all; FileExistsError when its name is taken."""

    @abstractmethod
    def _remove_records(self, job: str, names: Iterable[str]) -> None: ...

    @abstractmethod
    def _prepare(self, job: str) -> None:
        """Make what has to be there before a record can be created."""

    def append(self, job: str, record: Lineage | Ending | Pins | Hold) -> None:
        if isinstance(record, Lineage):
            require_number(record.number, MAX_LINEAGE, "lineage", job, self.url)
        self._prepare(job)
        if isinstance(record, Hold):
            self._create_record(job, record.name, msgspec.json.encode(record))
            return
        folder, notes = FOLDERS[type(record)], list[tuple[int, str]]()
        with self.fenced(job, record.attempt):
            if isinstance(record, Ending):
                name = f"{folder}/{record.attempt:08d}.json"
            elif isinstance(record, Pins):
                notes = self._numbered(job, Pins)
                turns = [int(each[-11:-5]) for number, each in notes if number == record.attempt]
                name = f"{folder}/{record.attempt:08d}-{max(turns, default=0) + 1:06d}.json"
            else:
                name = f"{folder}/{self._record_name(record)}"
                if any(number == record.number for number, _ in self._numbered(job, Lineage)):
                    where = f"{self.url}/{job}/{name}"
                    raise FileExistsError(errno.EEXIST, "there is a lineage of that number", where)
            self._create_record(job, name, msgspec.json.encode(record))
        with contextlib.suppress(OSError):  # they count no more, whether they go or not
            self._remove_records(job, [each for _, each in notes])

    def records(self, job: str, kind: type[R], since: int = 0) -> list[R]:
        while (found := self._read_records(job, kind, since)) is None:
            pass
        return found

    def latest_attempt(self, job: str) -> int:
        return max((number for number, _ in self._numbered(job, Attempt)), default=0)

    def record_names(self, job: str) -> list[RecordName]:
        return [
            RecordName(name=name, kind=kind, number=number)
            for kind, of in _REMOVABLE.items()
            for number, name in self._in_folder(job, of)
        ]

    def remove_record(self, job: str, name: str, attempt: int | None = None) -> None:
        with self.fenced(job, attempt) if attempt is not None else contextlib.nullcontext():
            self._remove_records(job, [name])

    def _in_folder(self, job: str, kind: type[Any]) -> list[tuple[int, str]]:
        """(number, name) by number; whatever has another name is none of ours."""
        found = filter(None, map(self.patterns[kind].fullmatch, self._record_files(job, FOLDERS[kind])))
        named = [(int(match[1] or 0), f"{FOLDERS[kind]}/{match[0]}") for match in found]
        return sorted(named, key=lambda each: (each[0], len(each[1]), each[1]))

    def _numbered(self, job: str, kind: type[Any]) -> list[tuple[int, str]]:
        """The records that count, in their order; notes of pins under numbers out of range come first."""
        if kind is Pins:
            return sorted(self._in_folder(job, Pins), key=lambda each: each[0] <= MAX_ATTEMPT)
        return [each for each in self._in_folder(job, kind) if each[0] <= _MOST[kind]]

    def _read_records(self, job: str, kind: type[R], since: int) -> list[R] | None:
        """None: the newest note of pins was replaced between the list and its reading."""
        found = []
        for number, name in self._numbered(job, kind)[-1 if kind is Pins else 0 :]:
            if number < since:
                continue
            where = f"{self.url}/{job}/{name}"
            try:
                found.append(decode_record(self.read_record(job, name), kind, number))
            except FileNotFoundError:  # removed meanwhile
                if kind is Pins:
                    return None
            except (msgspec.DecodeError, OSError) as error:
                if isinstance(error, OSError) and error.errno not in NO_RECORD:
                    raise
                if kind is Pins:
                    raise OSError(errno.EIO, f"is no note of pins ({error}): remove it", where) from error
                told = error.strerror if isinstance(error, OSError) else error
                logger.warning("%s is not a record of Holdfast's and is passed over: %s", where, told)
        return found


_REMOVABLE: dict[Literal["attempt", "ending", "lineage"], type[Any]] = {
    "attempt": Attempt, "ending": Ending, "lineage": Lineage,
}  # fmt: skip
"""In an order in which they may be removed."""


def decode_record(data: bytes, kind: type[R], number: int) -> R:
    """A record of a store, whose name says that it has this number.

    What somebody else wrote into a store must not decide on the numbers of those to come, or end a start: a name
    in a lineage's record that no checkpoint can have is left out.

    Raises:
        msgspec.DecodeError: it is no such record.
    """
    try:
        record = msgspec.json.decode(data, type=kind)
    except (RecursionError, UnicodeDecodeError) as error:
        raise msgspec.DecodeError(str(error)) from error
    numbered = getattr(record, "number", getattr(record, "attempt", number))
    if number != numbered:
        raise msgspec.DecodeError("it has another number than its name says")
    if isinstance(record, Lineage):
        if not 0 <= record.iteration <= MAX_ITERATION:
            raise msgspec.DecodeError(f"it begins after iteration {record.iteration}")
        named = {name: getattr(record, name) for name in ("parent", "left")}
        wrong = {name: None for name, found in named.items() if found is not None and not is_checkpoint_id(found)}
        return msgspec.structs.replace(record, **wrong) if wrong else record
    return record


def require_number(number: int, most: int, what: str, job: str, url: str) -> None:
    """OSError for the number of a record beyond the largest that there may be."""
    if number > most:
        way_out = f"run: holdfast store repair {url} --job {job}"
        raise OSError(
            errno.ERANGE, f"{what} {number} of {job} is beyond {most}, the largest number: {way_out}", url
        )


def newest_attempt(store: Store, job: str) -> Attempt | None:
    """None where there was none. OSError when its record cannot be read."""
    if not (number := store.latest_attempt(job)):
        return None
    if not (found := store.records(job, Attempt, number)):
        raise OSError(errno.EIO, f"the record of attempt {number} of {job} cannot be read", store.url)
    return found[-1]


def newest_pins(store: Store, job: str) -> Pins | None:
    """None where nothing was ever pinned. OSError when that cannot be told: nobody may take it for nothing."""
    return next(iter(store.records(job, Pins)), None)


def held(store: Store, job: str) -> set[str]:
    """What somebody copies just now, or had begun to not long ago. OSError: the store cannot say."""
    now = time.time()
    return {hold.checkpoint for hold in store.records(job, Hold) if now - hold.at < HOLD_SECONDS}


def descent(lineages: Iterable[Lineage], current: int) -> Iterator[tuple[int, int, str | None]]:
    """Which iterations stand: of `current` and the lineages that it descends from, newest first.

    (number, the last iteration that stands, the checkpoint that it began at): of a lineage that another one
    descends from, what it trained after that was given up.
    """
    known = {lineage.number: lineage for lineage in lineages}
    number, last = current, MAX_ITERATION
    while number:
        parent = known[number].parent if number in known else None
        yield number, last, parent
        last, before = parse_checkpoint_id(parent) if parent else (0, 0)
        number = before if before < number else 0  # a record that names a later lineage is none to follow


def protected(lineages: Iterable[Lineage], current: int, asked_for: Iterable[str] = ()) -> set[str]:
    """Where the lineages that `current` descends from began, the ways back, the last that were asked for."""
    lineages = sorted(lineages, key=lambda lineage: lineage.number)
    kept = {lineage.left for lineage in lineages[-UNDOABLE:]}
    kept |= {parent for _, _, parent in descent(lineages, current)}
    return {each for each in kept if each is not None} | set(list(asked_for)[-ASKED_FOR:])
