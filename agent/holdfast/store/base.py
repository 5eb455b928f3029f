"""The interface of stores, which keep checkpoints."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Protocol, Self

import msgspec

from holdfast.errors import DamagedCheckpoint
from holdfast.format.manifest import MANIFEST
from holdfast.protocol.wire import CopyPlace
from holdfast.store.records import Attempt, RecordStore

MOST_MANIFEST_BYTES = 256 << 20
"""More than the manifest of a 100 TB checkpoint takes; a larger file is not read into memory."""


class Leftover(msgspec.Struct, frozen=True, kw_only=True):
    """Something in a store that no session reads."""

    name: str
    what: str
    """Description for users: which attempt left it unfinished, or set it aside as damaged."""
    size_bytes: int


class CheckpointWriter(Protocol):
    """Writes a checkpoint, which is invisible until `commit` returns, and removed by `abort`.

    Several processes may write one checkpoint: the one that began it, and those that joined it, each its own
    files. Only the first may commit, once all files are durable, and its `abort` removes the files of all.
    """

    @property
    def folder(self) -> str:
        """Name of the folder it is being written in; another process passes it to `Store.join`."""
        ...

    def write(self, file: str, parts: Sequence[memoryview | bytes], *, pace: Pace | None = None) -> None:
        """Write the concatenation of `parts` to a file, and make its bytes durable.

        The parts must not change until it returns. Page-aligned parts go to the device without a copy where the
        store supports it. `pace` is called with a number of bytes before they are written, and may wait.

        Raises:
            Fenced: a newer attempt has begun and removed what was written; a store need not notice here.
            OSError: the store failed; what was written so far is unusable.
        """
        ...

    def copy_file(
        self, job: str, checkpoint: str, file: str, *, only_link: bool = False, size_bytes: int | None = None
    ) -> None:
        """Add a copy of a file of a committed checkpoint in this store, which may belong to another job.

        The copy takes no space where the store supports that, and stays when the original is deleted. With
        `only_link`, it is an OSError where the bytes would have to pass through this process.

        Raises:
            DamagedCheckpoint: there is no such file, or none of `size_bytes`.
            Fenced, OSError: as `write`.
        """
        ...

    def make_durable(self) -> None:
        """Make the names of the files that were written here durable as well.

        Raises:
            Fenced: as `write`.
            OSError: the store failed, or the process that began the checkpoint has aborted it.
        """
        ...

    def commit(self, manifest: bytes, *, replace: bool = False) -> None:
        """Make the checkpoint durable and visible atomically. Not for a writer that joined.

        With `replace`, a damaged checkpoint of the same name is set aside.

        Raises:
            Fenced: a newer attempt has begun.
            FileExistsError: there is a checkpoint of that name.
            OSError: the store failed.
        """
        ...

    def abort(self) -> None:
        """Remove what was written; never raises. Does nothing on a writer that joined: it may be committed."""
        ...


class FileReplacer(Protocol):
    """Replaces damaged files of a committed checkpoint. It refuses once a newer attempt has begun."""

    def replace(self, file: str, parts: Sequence[memoryview | bytes], *, pace: Pace | None = None) -> None:
        """Replace a file by the concatenation of `parts`, atomically and durably.

        A reader sees the whole old file or the whole new one.

        Raises:
            Fenced: a newer attempt has begun, or the checkpoint was replaced or removed.
            OSError: the store failed.
        """
        ...


class Pace(Protocol):
    """Limits the rate of background I/O, so that training is not slowed."""

    def __call__(self, size_bytes: int, /) -> None: ...


class FileReader(ABC):
    """A file of a committed checkpoint, open for reading. A context manager."""

    size_bytes: int
    seeks_freely = False
    """Whether many small reads take about as long as a large one."""

    @abstractmethod
    def read_into(self, start: int, target: memoryview) -> None:
        """Fill `target` with the bytes from `start` on. Thread-safe.

        Raises:
            DamagedCheckpoint: the file is too short, or its storage device cannot read it.
            OSError: the store cannot be reached, which says nothing about the file.
        """

    def find_damage(self) -> None:  # noqa: B027  most readers read one file
        """Do nothing, unless what is read is made of several files.

        Otherwise raise DamagedCheckpoint, which names the one that differs from what was written, if one does.
        """

    def close(self) -> None:  # noqa: B027  most readers hold nothing open
        """Do nothing, unless a reader holds something open."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Store(RecordStore):
    """Keeps the checkpoints and records of jobs.

    The interface consists of whole files and numbered records, which both a directory and an object store can
    guarantee: it has no rename, lock or append.
    """

    read_threads: int
    """Number of concurrent reads that gives the highest throughput."""
    takes_descriptors: bool = False
    """Whether another process can fill a file by its descriptor, as `LocalWriter.write_with` lets it."""
    shares_files: bool
    """Whether a copy of a file takes no space."""

    @abstractmethod
    def free_bytes(self) -> int | None:
        """Return the free space, or None where it is unknown. OSError when the store is unavailable."""

    def total_bytes(self) -> int | None:
        """Return the size of the file system, or None where it is unknown. OSError when it is unavailable."""
        return None

    @abstractmethod
    def jobs(self) -> list[str]:
        """List the names of all jobs."""

    @abstractmethod
    def checkpoints(self, job: str) -> list[str]:
        """List the committed checkpoints by iteration, then lineage."""

    def resident(self, job: str) -> list[str]:
        """List the committed checkpoints that take space where new ones are written, in the same order."""
        return self.checkpoints(job)

    @property
    def addresses(self) -> list[str]:
        """Addresses of the store, and of the one behind it that has copies, if there is one."""
        return [self.url]

    def copies(self, job: str) -> Mapping[str, CopyPlace]:
        """Return where the checkpoints are that have a copy which takes no space there, as far as it is known."""
        return {}

    def places(self, job: str, checkpoint: str) -> list[str] | None:
        """Return the addresses of the stores that have a checkpoint, or None where this is the only one."""
        return None

    def copy_elsewhere(self, job: str, checkpoint: str) -> Store | None:
        """Return another store that has a copy of a checkpoint of this one, or None."""
        return None

    @abstractmethod
    def open_file(self, job: str, checkpoint: str, file: str, *, from_disk: bool = False) -> FileReader:
        """Open a file that the manifest names; DamagedCheckpoint when there is none.

        With `from_disk` its bytes come from the storage device: verifying a copy in the page cache would prove
        nothing about the device.
        """

    @abstractmethod
    def begin(self, job: str, checkpoint: str, attempt: int, size_bytes: int) -> CheckpointWriter:
        """Begin a checkpoint of about `size_bytes`; OSError when there is no space for it."""

    @abstractmethod
    def join(self, job: str, checkpoint: str, attempt: int, folder: str, size_bytes: int) -> CheckpointWriter:
        """Write about `size_bytes` of a checkpoint that another process began, and will commit.

        Raises:
            ValueError: `folder` cannot come from a writer of this checkpoint and attempt.
            Fenced: a newer attempt has begun.
            OSError: there is no space for it, or the begun checkpoint is not visible here.
        """

    @abstractmethod
    def file_replacer(self, job: str, checkpoint: str) -> FileReplacer:
        """Begin the repair of a checkpoint as it is now. DamagedCheckpoint when there is none."""

    @abstractmethod
    def delete(self, job: str, checkpoint: str, attempt: int) -> None:
        """Remove a checkpoint; Fenced when `attempt` is no longer the newest."""

    @abstractmethod
    def acquire_attempt(self, job: str, uid: str, at_least: int = 1, *, order: str | None = None) -> Attempt:
        """Become the newest attempt of a job and fence all earlier ones; `order` is the open restore order."""

    @abstractmethod
    def leftovers(self, job: str) -> list[Leftover]:
        """List what earlier attempts left unfinished, and what was set aside as damaged.

        What the newest attempt left unfinished is not listed: the supervisor may still commit it when the trainer
        has died.
        """

    @abstractmethod
    def remove_leftover(self, job: str, name: str) -> None:
        """Remove a leftover. OSError when something in it cannot be removed."""


def read_manifest(
    store: Store, job: str, checkpoint: str, name: str = MANIFEST, *, from_disk: bool = False
) -> bytes:
    """Return the bytes of a manifest, or of its copy `name`; DamagedCheckpoint when there is none."""
    with store.open_file(job, checkpoint, name, from_disk=from_disk) as file:
        if file.size_bytes > MOST_MANIFEST_BYTES:
            size = f"{file.size_bytes:,}"
            raise DamagedCheckpoint(f"{checkpoint}/{name}", f"is {size} bytes long, too large for a manifest")
        data = bytearray(file.size_bytes)
        file.read_into(0, memoryview(data))
    return bytes(data)
