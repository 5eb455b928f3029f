"""Records of jobs: small files, written once and never changed, in the same way in all stores.

<job>/attempts/   one per start; only the attempt with the highest number may write
<job>/endings/    how an attempt ended, unless it was killed; the next one counts those that failed
<job>/lineages/   where each lineage began
<job>/pins/       <attempt, 8 digits>-<turn, 6 digits>.json: only the last one counts. A late write of an older
                  attempt sorts before those of newer attempts and changes nothing
<job>/halts/      whether training is paused; as pins: only the last one counts
<job>/holds/      a checkpoint that is being copied
<job>/values/     changes of values, each before it is in force
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar, TypeVar

import msgspec

from holdfast.errors import Fenced
from holdfast.protocol.field_types import MAX_ATTEMPT, MAX_ITERATION, MAX_LINEAGE
from holdfast.protocol.ids import is_checkpoint_id, parse_checkpoint_id
from holdfast.protocol.orders import HaltState
from holdfast.protocol.values import Scalar
from holdfast.protocol.wire import INTENDED_ENDS, REQUESTED_EXITS, LeftOutData, Origin

logger = logging.getLogger("holdfast")

FORK_UID = "fork-"
"""Prefix of the uid of an attempt that made a fork."""
ASKED_FOR = 8
"""Number of the newest checkpoints taken on request that retention keeps."""
HOLD_SECONDS = 86400.0
"""Longer than any copy takes: the process that began it has died."""
UNDOABLE = 3
"""Number of the last restores that can be undone: retention keeps the states that they replaced."""
NO_RECORD = (errno.ENXIO, errno.EFBIG, errno.ELOOP)
"""Errors that mean that a name does not refer to a record."""
STARTING_SECONDS = 60.0
"""An attempt that recorded no ending and was replaced this quickly counts as a failed start, not a training
failure."""


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One start of a job's processes; only the attempt with the highest number may commit."""

    number: int
    uid: str
    host: str
    pid: int
    started_at: float
    order: str | None = None
    """The restore order that was open when it began, recorded before it is carried out."""


class Lineage(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence of iterations without a restore, recorded before the first of them is trained."""

    number: int
    iteration: int
    """The iteration after which it begins: 0, or that of the restored checkpoint."""
    parent: str | None
    """The restored checkpoint; None for a fresh start."""
    order: str | None
    """The restore order that began it, so that a crash cannot make the order act twice."""
    attempt: int
    created_at: float
    left: str | None = None
    """The safety checkpoint of the state that the restore replaced, used to undo it."""
    origin: Origin | None = None
    """For the first lineage of a fork, the checkpoint of another job that `parent` is a copy of."""
    inexact: str | None = None
    """The checkpoint whose degraded restore its state descends from; None if its state is exact."""
    left_out: tuple[LeftOutData, ...] = ()
    """Data that was left out on the way to its state, oldest first; a start that loads an earlier checkpoint
    leaves out what that one does not name."""
    trouble: int | None = None
    """The first iteration with a wrong loss, where the rule `on_trouble` began it."""

    @property
    def is_restore(self) -> bool:
        """Whether a restore began it, of which this names the order or what it replaced."""
        return self.order is not None or self.left is not None


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """How an attempt ended; a killed attempt leaves none."""

    attempt: int
    reason: str
    """`finished`, `interrupted` or the exception that ended the loop."""
    iterations: int
    """Number of iterations that it trained."""
    at: float


class Pins(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoints that operators pinned, as an attempt last knew them; retention keeps them."""

    attempt: int
    checkpoints: tuple[str, ...]
    at: float


class HaltNote(msgspec.Struct, frozen=True, kw_only=True):
    """Whether training is paused, goes on, or was ended; so the next start knows it without a server."""

    attempt: int
    state: HaltState
    by: str
    order: str | None
    """The newest order that was known then: any other one is newer."""
    iteration: int
    at: float


class Hold(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that is being copied; retention keeps it until then."""

    uid: str
    checkpoint: str
    at: float

    @property
    def name(self) -> str:
        return f"{FOLDERS[Hold]}/{self.uid}.json"


class RecordedValue(msgspec.Struct, frozen=True, kw_only=True):
    """A change of a value, recorded before it is in force; of several with the same `change` the last counts."""

    number: int
    lineage: int
    iteration: int
    """It is in force from the iteration after this one on."""
    attempt: int
    change: str
    """Id of the change that an operator made."""
    name: str
    value: Scalar | None
    """`None`: the script's own."""
    at: float


Record = Attempt | Lineage | Ending | Pins | HaltNote | Hold | RecordedValue
R = TypeVar("R", bound=msgspec.Struct)

FOLDERS: dict[type[Any], str] = {
    Attempt: "attempts", Ending: "endings", Lineage: "lineages", Pins: "pins", HaltNote: "halts", Hold: "holds",
    RecordedValue: "values",
}  # fmt: skip
LAST_COUNTS: tuple[type[Any], ...] = (Pins, HaltNote)
"""Kinds of records of which only the last one counts; earlier ones are removed."""
_MOST: dict[type[Any], int] = {
    Attempt: MAX_ATTEMPT, Ending: MAX_ATTEMPT, Lineage: MAX_LINEAGE, Hold: 0, RecordedValue: MAX_LINEAGE,
}  # fmt: skip
PATTERNS: dict[type[Any], re.Pattern[str]] = {
    RecordedValue: re.compile(r"([0-9]{8,})\.json"),
    Ending: re.compile(r"([0-9]{8,})\.json"),
    **dict.fromkeys(LAST_COUNTS, re.compile(r"([0-9]{8,})-([0-9]{6,})\.json")),
    Hold: re.compile(r"().+\.json"),
}
"""Patterns of names within a folder that all stores share; the first group is the number."""


class RecordStore(ABC):
    """Records, on top of the small named files and the fencing of a store."""

    url: str
    """Address of the store, without credentials; `open_store` opens it again, in any process."""
    patterns: ClassVar[Mapping[type[Any], re.Pattern[str]]] = (
        dict.fromkeys((Attempt, Lineage), re.compile(r"([0-9]+)\.json")) | PATTERNS
    )
    """Patterns of the names within a folder, by kind of record."""

    @abstractmethod
    def read_record(self, job: str, name: str) -> bytes:
        """Return the bytes of a record. OSError when there is none, or it is no regular file."""

    @abstractmethod
    def fenced(self, job: str, attempt: int) -> AbstractContextManager[None]:
        """Raise Fenced unless `attempt` is the newest of the job, and still is when the block takes effect."""

    @abstractmethod
    def record_files(self, job: str, folder: str) -> Iterable[str]:
        """List the names in a folder; none where it does not exist."""

    def record_name(self, record: Attempt | Lineage) -> str:
        """Name a record within its folder."""
        return f"{record.number:0{8 if isinstance(record, Attempt) else 6}d}.json"

    @abstractmethod
    def create_record(self, job: str, name: str, data: bytes) -> None:
        """Create a record durably and atomically; FileExistsError when the name is taken."""

    @abstractmethod
    def remove_records(self, job: str, names: Iterable[str]) -> None:
        """Remove records durably."""

    def prepare(self, job: str) -> None:  # noqa: B027  most stores have no folders
        """Create the folders that records need."""

    def append(self, job: str, record: Lineage | Ending | Pins | HaltNote | Hold | RecordedValue) -> None:
        """Add a record durably. Pins and notes of halts replace the previous ones.

        Raises:
            Fenced: a newer attempt than the record's has begun.
            FileExistsError: this lineage, number of a value, or ending of this attempt is already recorded.
            OSError: the store failed.
        """
        if isinstance(record, Lineage):
            require_number(record.number, MAX_LINEAGE, "lineage", job, self.url)
        self.prepare(job)
        if isinstance(record, Hold):
            self.create_record(job, record.name, msgspec.json.encode(record))
            return
        folder, notes = FOLDERS[type(record)], list[tuple[int, str]]()
        with self.fenced(job, record.attempt):
            if isinstance(record, Ending):
                name = f"{folder}/{record.attempt:08d}.json"
            elif isinstance(record, RecordedValue):
                name = f"{folder}/{record.number:08d}.json"
            elif isinstance(record, Pins | HaltNote):
                notes = self._numbered(job, type(record))
                turns = [int(each[-11:-5]) for number, each in notes if number == record.attempt]
                name = f"{folder}/{record.attempt:08d}-{max(turns, default=0) + 1:06d}.json"
            else:
                name = f"{folder}/{self.record_name(record)}"
                if any(number == record.number for number, _ in self._numbered(job, Lineage)):
                    where = f"{self.url}/{job}/{name}"
                    raise FileExistsError(errno.EEXIST, "this lineage is already recorded", where)
            self.create_record(job, name, msgspec.json.encode(record))
        with contextlib.suppress(OSError):  # they no longer count, whether this succeeds or not
            self.remove_records(job, [each for _, each in notes])

    def records(self, job: str, kind: type[R], since: int = 0) -> list[R]:
        """List the records of a kind by number, from `since` on; of `LAST_COUNTS` only the newest.

        Anything that is not a record is ignored, unless it is in the place of the newest of those. OSError when
        the store cannot be read.
        """
        while (found := self._read_records(job, kind, since)) is None:
            pass
        return found

    def latest_attempt(self, job: str) -> int:
        """Return the number of the newest attempt; 0 when there is none."""
        return max((number for number, _ in self._numbered(job, Attempt)), default=0)

    def remove_record(self, job: str, name: str) -> None:
        self.remove_records(job, [name])

    def _in_folder(self, job: str, kind: type[Any]) -> list[tuple[int, str]]:
        """List (number, name) by number, without names that no record has."""
        found = filter(None, map(self.patterns[kind].fullmatch, self.record_files(job, FOLDERS[kind])))
        named = [(int(match[1] or 0), f"{FOLDERS[kind]}/{match[0]}") for match in found]
        return sorted(named, key=lambda each: (each[0], len(each[1]), each[1]))

    def _numbered(self, job: str, kind: type[Any]) -> list[tuple[int, str]]:
        """List the records that count, in order; pins under numbers out of range come first."""
        if kind in LAST_COUNTS:
            return sorted(self._in_folder(job, kind), key=lambda each: each[0] <= MAX_ATTEMPT)
        return [each for each in self._in_folder(job, kind) if each[0] <= _MOST[kind]]

    def _read_records(self, job: str, kind: type[R], since: int) -> list[R] | None:
        """Read the records of a kind; None when the one that counts was replaced since they were listed."""
        found = []
        for number, name in self._numbered(job, kind)[-1 if kind in LAST_COUNTS else 0 :]:
            if number < since:
                continue
            where = f"{self.url}/{job}/{name}"
            try:
                found.append(decode_record(self.read_record(job, name), kind, number))
            except FileNotFoundError:  # removed meanwhile
                if kind in LAST_COUNTS:
                    return None
            except (msgspec.DecodeError, OSError) as error:
                if isinstance(error, OSError) and error.errno not in NO_RECORD:
                    raise
                if kind in LAST_COUNTS:
                    what = f"is not a record of {FOLDERS[kind]} ({error}): remove it"
                    raise OSError(errno.EIO, what, where) from error
                reason = error.strerror if isinstance(error, OSError) else error
                logger.warning("%s is not a Holdfast record, ignoring it: %s", where, reason)
        return found


def decode_record(data: bytes, kind: type[R], number: int) -> R:
    """Decode a record whose name contains `number`.

    A record that another program wrote must neither determine later numbers nor fail a start: a checkpoint name
    that cannot exist is dropped from the record of a lineage.

    Raises:
        msgspec.DecodeError: it is not such a record.
    """
    try:
        record = msgspec.json.decode(data, type=kind)
    except (RecursionError, UnicodeDecodeError) as error:
        raise msgspec.DecodeError(str(error)) from error
    numbered = getattr(record, "number", getattr(record, "attempt", number))
    if number != numbered:
        raise msgspec.DecodeError("its number differs from that in its name")
    if isinstance(record, Lineage):
        if not 0 <= record.iteration <= MAX_ITERATION:
            raise msgspec.DecodeError(f"it begins after iteration {record.iteration}")
        named = {name: getattr(record, name) for name in ("parent", "left")}
        wrong = {name: None for name, found in named.items() if found is not None and not is_checkpoint_id(found)}
        return msgspec.structs.replace(record, **wrong) if wrong else record
    return record


def require_number(number: int, most: int, what: str, job: str, url: str) -> None:
    """Raise OSError for a record number beyond the largest allowed one."""
    if number > most:
        raise OSError(
            errno.ERANGE,
            f"{what} {number} of {job} exceeds the largest number {most}: another program wrote to the store. To "
            f"continue training, run holdfast fork {job} latest NEW --store {url}",
            url,
        )


def newest_attempt(store: RecordStore, job: str) -> Attempt | None:
    """Return the newest attempt of a job, or None. OSError when its record cannot be read."""
    if not (number := store.latest_attempt(job)):
        return None
    if not (found := store.records(job, Attempt, number)):
        raise OSError(errno.EIO, f"the record of attempt {number} of {job} cannot be read", store.url)
    return found[-1]


def newest_pins(store: RecordStore, job: str) -> Pins | None:
    """Return the last recorded pins, or None. OSError when they cannot be read, which does not mean none."""
    return next(iter(store.records(job, Pins)), None)


def newest_halt(store: RecordStore, job: str) -> HaltNote | None:
    """Return the last note of a halt, or None. OSError when it cannot be read."""
    return next(iter(store.records(job, HaltNote)), None)


def held_checkpoints(store: RecordStore, job: str) -> set[str]:
    """Return the checkpoints that are being copied. OSError when the store cannot be read."""
    now = time.time()
    return {hold.checkpoint for hold in store.records(job, Hold) if now - hold.at < HOLD_SECONDS}


def ancestry(lineages: Iterable[Lineage], current: int) -> Iterator[tuple[int, int, str | None]]:
    """Yield `current` and the lineages that it descends from, newest first.

    Each is (number, its last iteration that still counts, the checkpoint that it began from): a restore abandons
    the iterations that its lineage trained after the restored checkpoint.
    """
    known = {lineage.number: lineage for lineage in lineages}
    number, last = current, MAX_ITERATION
    while number:
        parent = known[number].parent if number in known else None
        yield number, last, parent
        last, before = parse_checkpoint_id(parent) if parent else (0, 0)
        number = before if before < number else 0  # ignore a record that names a later lineage


def protected_checkpoints(lineages: Iterable[Lineage], current: int, asked_for: Iterable[str] = ()) -> set[str]:
    """Return the checkpoints that retention always keeps.

    These are where the lineages that `current` descends from began, the states that the last restores replaced,
    and the newest checkpoints taken on request.
    """
    lineages = sorted(lineages, key=lambda lineage: lineage.number)
    kept = {lineage.left for lineage in lineages[-UNDOABLE:]}
    kept |= {parent for _, _, parent in ancestry(lineages, current)}
    return {each for each in kept if each is not None} | set(list(asked_for)[-ASKED_FOR:])


def record_ending(store: RecordStore, job: str, attempt: int, reason: str, iterations: int) -> None:
    """Say in the store how `attempt` ends, having trained so many iterations."""
    try:
        store.append(job, Ending(attempt=attempt, reason=reason, iterations=iterations, at=time.time()))
    except (OSError, Fenced) as error:
        logger.debug("%s: how attempt %d ended is not noted: %s", job, attempt, error)


def failures_between(store: RecordStore, job: str, first: int, present: int, last_exit: str | None = None) -> int:
    """How many attempts from `first` up to the one before `present` failed while they trained.

    One that was stopped by a person or a scheduler did not, nor one that ended before it had trained. `first` has
    taken a checkpoint, and so has trained.

    Args:
        last_exit: how the last of them ended, as its supervisor saw it.
    """
    try:
        attempts = store.records(job, Attempt, first)
        endings = {ending.attempt: ending for ending in store.records(job, Ending, first)}
    except OSError:  # it is a figure for planning, for which no start waits; none is better than a wrong one
        return 0
    failed = 0
    for attempt, following in itertools.pairwise(attempts):
        if following.number > present:
            break
        if following.number == present and last_exit in REQUESTED_EXITS:
            continue
        if (ending := endings.get(attempt.number)) is not None:
            failed += ending.reason not in INTENDED_ENDS and ending.iterations > 0
        else:
            has_trained = following.started_at - attempt.started_at >= STARTING_SECONDS
            failed += attempt.number == first or has_trained
    return failed


def first_start_note(store: RecordStore, job: str, attempt: int) -> str:
    """Explain the number of the first attempt of a fork that trains; empty for any other attempt."""
    before: list[Attempt] = []
    with contextlib.suppress(OSError):  # it is only a note
        before = [each for each in store.records(job, Attempt) if each.number < attempt]
    if not before or not all(each.uid.startswith(FORK_UID) for each in before):
        return ""
    return f" (attempt {before[-1].number} made the fork)"
