"""The seam between checkpoints and the places that keep them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Self

import msgspec

from holdfast.errors import DamagedCheckpoint
from holdfast.format.manifest import MANIFEST
from holdfast.store.records import Attempt, Ending, Hold, Lineage, Pins, R, RecordName

MOST_MANIFEST_BYTES = 256 << 20
"""More than the digests of 100 TB take; a larger file is not read into memory."""


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

    def append(self, job: str, record: Lineage | Ending | Pins | Hold) -> None:
        """Note something about a job, durably. A note of pins takes the place of the one before it.

        Raises:
            Fenced: a newer attempt than the record's has begun.
            FileExistsError: there is a lineage of that number, or this attempt has noted how it ended.
            OSError: the store cannot.
        """
        ...

    def records(self, job: str, kind: type[R], since: int = 0) -> list[R]:
        """The records of a kind by number, from `since` on; of `Pins` only the newest.

        What is no record is passed over, except in the place of the newest pins. OSError: the store cannot say.
        """
        ...

    def record_names(self, job: str) -> list[RecordName]:
        """Of all attempts, endings and lineages, in an order in which they may be removed."""
        ...

    def read_record(self, job: str, name: str) -> bytes:
        """OSError where there is none, or something else in its place."""
        ...

    def remove_record(self, job: str, name: str, attempt: int | None = None) -> None:
        """Remove one; Fenced when `attempt` is given and no longer the newest."""
        ...

    def leftovers(self, job: str) -> list[Leftover]:
        """What attempts before the newest left half-done, and what was set aside as damaged.

        Not what the newest has half-done: its helper may still be writing that when its own process has died.
        """
        ...

    def remove_leftover(self, job: str, name: str) -> None:
        """Remove one of these, as far as that can be done."""
        ...

    def forsake(self, job: str, checkpoint: str, attempt: int) -> None:
        """Remove what a writer of `attempt` that has died had half-done of a checkpoint; never raises."""
        ...


def read_manifest(store: Store, job: str, checkpoint: str) -> bytes:
    """DamagedCheckpoint when there is none."""
    with store.open_file(job, checkpoint, MANIFEST) as file:
        if file.size_bytes > MOST_MANIFEST_BYTES:
            size = f"{file.size_bytes:,}"
            raise DamagedCheckpoint(f"{checkpoint}/{MANIFEST}", f"is {size} bytes long: no manifest is")
        data = bytearray(file.size_bytes)
        file.read_into(0, memoryview(data))
    return bytes(data)
