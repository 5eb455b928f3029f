"""The seam between checkpoints and the places that keep them."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Literal, Protocol, Self, TypeVar

import msgspec

from holdfast.protocol import MAX_ITERATION, Origin, is_checkpoint_id

T = TypeVar("T")
MOST_MANIFEST_BYTES = 1 << 30
"""Far more than the manifest of any checkpoint takes; a larger file is not read into memory."""


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


def decode_record(data: bytes, kind: type[T], number: int | None = None) -> T:
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
    if number is not None and number != getattr(record, "attempt" if kind is Ending else "number"):
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


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A record as its name gives it. Somebody else may have written it: the number may be out of range."""

    name: str
    kind: Literal["attempt", "ending", "lineage"]
    number: int
    is_needed: bool = False
    """The store cannot manage its checkpoints without this record."""


class Leftover(msgspec.Struct, frozen=True, kw_only=True):
    """Something in a store that no session reads any more."""

    name: str
    what: str
    """For people: half-written by which attempt, or set aside as damaged."""
    size_bytes: int


class CheckpointWriter(Protocol):
    """A checkpoint in the making: invisible until `commit` returns, gone after `abort`.

    Several processes may write into one: the one that has begun it, and those that have joined it, each to files
    of its own. Only the first may commit, once all have settled, and its `abort` removes what any of them wrote.
    """

    @property
    def place(self) -> str:
        """Where in the store it is being made, as another process can be told: for `Store.join`."""
        ...

    def write(self, file: str, parts: Sequence[memoryview | bytes], *, pace: Pace | None = None) -> None:
        """Write a file from its parts, one behind the other, and make its bytes durable.

        The parts must not change until it returns. Parts that begin at a page go to the device without a
        copy where the store can do that. `pace` is called before each stretch of bytes is written and may wait.

        Raises:
            Fenced: a newer attempt has begun, and removed what was written; a store need not notice yet.
            OSError: the store cannot; what was written so far is nobody's.
        """
        ...

    def adopt(self, job: str, checkpoint: str, file: str) -> None:
        """Have a file of a committed checkpoint of this store, which may be another job's, stand here as well.

        It takes no room where the store can do that, and stays when the other one is deleted.

        Raises:
            DamagedCheckpoint: there is no such file.
            Fenced, OSError: as `write`.
        """
        ...

    def settle(self) -> None:
        """What was written here stays after a power cut, names too.

        Raises:
            Fenced: a newer attempt has begun, and removed what was written; a store need not notice yet.
            OSError: the store cannot, or whoever began it has aborted it.
        """
        ...

    def commit(self, manifest: bytes, *, replace: bool = False) -> None:
        """Make it durable and visible, all of it or nothing. Not for a writer that has joined.

        With `replace` a checkpoint of the same name, known to be damaged, is set aside for it.

        Raises:
            Fenced: a newer attempt has begun.
            FileExistsError: there is a checkpoint of that name.
            OSError: the store cannot.
        """
        ...

    def abort(self) -> None:
        """Forget it; never raises. Of a writer that has joined nothing is removed: it may have been committed."""
        ...


class Pace(Protocol):
    """Holds background writing back so that training goes first."""

    def __call__(self, size_bytes: int, /) -> None: ...


class FileReader(Protocol):
    """A file of a committed checkpoint, open for reading. A context manager."""

    size_bytes: int

    def read_into(self, start: int, target: memoryview) -> None:
        """Fill `target` with the bytes from `start` on; several threads may at the same time.

        Raises:
            DamagedCheckpoint: the file ends before, or cannot be read where it is kept.
            OSError: it cannot be reached, which says nothing about the file.
        """
        ...

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...


class Store(Protocol):
    """Keeps the checkpoints, attempts and lineages of jobs.

    The seam stops at whole files and numbered records, which a directory and an object store can both
    promise: nothing here renames, locks or appends.
    """

    url: str
    readers: int
    """So many threads that read at once get the most out of it."""

    def free_bytes(self) -> int | None:
        """Room left; None where that cannot be told. OSError when the store is away."""
        ...

    def jobs(self) -> list[str]: ...

    def checkpoints(self, job: str) -> list[str]:
        """The committed ones, by iteration, then lineage."""
        ...

    def read_manifest(self, job: str, checkpoint: str) -> bytes:
        """DamagedCheckpoint when there is none."""
        ...

    def open_file(self, job: str, checkpoint: str, file: str, *, from_disk: bool = False) -> FileReader:
        """A file that its manifest names; DamagedCheckpoint when there is none.

        With `from_disk` its bytes come from where they are kept, not out of a cache on the way: to verify a copy
        in this machine's memory says nothing of the disk.
        """
        ...

    def begin(self, job: str, checkpoint: str, attempt: int, size_bytes: int) -> CheckpointWriter:
        """Start a checkpoint of about `size_bytes`; OSError when there is no room for it."""
        ...

    def join(self, job: str, checkpoint: str, attempt: int, place: str, size_bytes: int) -> CheckpointWriter:
        """Write about `size_bytes` into a checkpoint that another process has begun, which commits it.

        Raises:
            ValueError: `place` is none that a writer of this checkpoint and attempt can have given.
            Fenced: a newer attempt has begun.
            OSError: there is no room for it, or what was begun is not to be seen here.
        """
        ...

    def delete(self, job: str, checkpoint: str, attempt: int) -> None:
        """Remove one; Fenced when `attempt` is no longer the newest."""
        ...

    def acquire_attempt(self, job: str, uid: str, at_least: int = 1, *, order: str | None = None) -> Attempt:
        """Become the newest attempt of a job, fencing all before it. `order`: the one that it finds open."""
        ...

    def latest_attempt(self, job: str) -> int:
        """0 where there was none."""
        ...

    def newest_attempt(self, job: str) -> Attempt | None: ...

    def note_ending(self, job: str, ending: Ending) -> None:
        """Note how an attempt has ended, durably. Nobody but the attempt itself does, once.

        Raises:
            Fenced: a newer attempt has begun, and has judged for itself.
            OSError: the store cannot.
        """
        ...

    def attempts(self, job: str, since: int = 1) -> list[Attempt]:
        """By number, from `since` on."""
        ...

    def endings(self, job: str, since: int = 1) -> list[Ending]:
        """By attempt, from `since` on, of those that said how they ended."""
        ...

    def note_pins(self, job: str, pins: Pins) -> None:
        """Note which checkpoints people keep, durably, in the place of what was noted before.

        Raises:
            Fenced: a newer attempt has begun, and is told for itself.
            OSError: the store cannot; what was noted before stands, or this does.
        """
        ...

    def pins(self, job: str) -> Pins | None:
        """The newest note; None where there is none. OSError when it cannot be read: then nobody may take it that
        nothing is pinned."""
        ...

    def hold(self, job: str, hold: Hold) -> None:
        """Ask whoever looks after the job to leave a checkpoint for now. OSError: the store cannot."""
        ...

    def release(self, job: str, uid: str) -> None:
        """Take that back; never raises."""
        ...

    def holds(self, job: str) -> list[Hold]:
        """Those that were not taken back, however old."""
        ...

    def leftovers(self, job: str) -> list[Leftover]:
        """What attempts before the newest left half-done, and what was set aside as damaged.

        Not what the newest has half-done: its helper may still be writing that when its own process has died.
        """
        ...

    def remove_leftover(self, job: str, name: str) -> None:
        """Remove one of these, as far as that can be done."""
        ...

    def records(self, job: str) -> list[Record]:
        """All records of attempts, endings and lineages, in an order in which they may be removed."""
        ...

    def read_record(self, job: str, name: str) -> bytes:
        """OSError where there is none, or something else in its place."""
        ...

    def remove_record(self, job: str, name: str, attempt: int) -> None:
        """Remove one of these; Fenced when `attempt` is no longer the newest."""
        ...

    def forsake(self, job: str, checkpoint: str, attempt: int) -> None:
        """Remove what a writer of `attempt` that has died had half-done of a checkpoint; never raises."""
        ...

    def begin_lineage(self, job: str, lineage: Lineage) -> None:
        """Note a lineage durably; FileExistsError when its number is taken."""
        ...

    def lineages(self, job: str) -> list[Lineage]:
        """By number."""
        ...
