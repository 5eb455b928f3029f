"""The files of a checkpoint in a bucket, read and written."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Sequence
from typing import Protocol, Self

from holdfast.errors import DamagedCheckpoint, Fenced
from holdfast.format import MANIFEST
from holdfast.store.base import Pace
from holdfast.store.bucket import Bucket
from holdfast.store.bucket_errors import NoSuchObject, Unanswered
from holdfast.store.object_keys import Folder, Survey


class Home(Protocol):
    """Of the store that a checkpoint is written to, what its writer asks."""

    bucket: Bucket
    url: str

    def survey(self, job: str, checkpoint: str = "") -> Survey: ...
    def latest_attempt(self, job: str) -> int: ...
    def keys_below(self, job: str, folder: str) -> list[str]: ...
    def source(self, job: str, checkpoint: str, file: str) -> tuple[str, int]: ...


class ObjectReader:
    """A file of a checkpoint."""

    def __init__(self, bucket: Bucket, name: str, size_bytes: int) -> None:
        self._bucket, self.name, self.size_bytes = bucket, name, size_bytes

    def read_into(self, start: int, target: memoryview) -> None:
        """As in `FileReader`; OSError when the server is away, which says nothing about the checkpoint."""
        url = f"{self._bucket.place.url}/{self.name}"
        if start + len(target) > self.size_bytes:
            raise DamagedCheckpoint(url, f"ends at byte {self.size_bytes:,}")
        try:
            self._bucket.read(self.name, start, target)
        except NoSuchObject as error:
            raise DamagedCheckpoint(url, "there is no such object any more") from error

    def close(self) -> None:
        """Nothing is open between two requests."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class ObjectWriter:
    """A checkpoint in a folder of its own, where no late request of another attempt or try meets its bytes."""

    def __init__(self, store: Home, job: str, folder: Folder) -> None:
        self._store, self._job, self._folder = store, job, folder
        self._decided = False
        """Its manifest is there, or may be: it is for the next attempt to say what it is."""
        self._told = False
        """Others were told of the place, and may have written there."""

    @property
    def place(self) -> str:
        self._told = True
        return self._folder.name

    def write(self, file: str, parts: Sequence[memoryview | bytes], *, pace: Pace | None = None) -> None:
        self._folder.files[file] = sum(len(part) for part in parts)
        self._store.bucket.upload(f"{self._job}/{self._folder.path}/{file}", parts, pace)

    def adopt(self, job: str, checkpoint: str, file: str) -> None:
        source, size_bytes = self._store.source(job, checkpoint, file)
        self._folder.files[file] = size_bytes
        try:
            self._store.bucket.copy(source, f"{self._job}/{self._folder.path}/{file}", size_bytes)
        except NoSuchObject as error:
            raise DamagedCheckpoint(f"{self._store.url}/{source}", "there is no such object any more") from error

    def settle(self) -> None:
        """Nothing: an object that was put stays."""

    def commit(self, manifest: bytes, *, replace: bool = False) -> None:
        store, job, checkpoint = self._store, self._job, self._folder.checkpoint
        attempt, _ = self._folder.order
        survey = store.survey(job, checkpoint)
        require_newest(survey.newest, job, attempt)
        if not replace and checkpoint in survey.committed():
            url = f"{store.url}/{job}/{checkpoint}"
            raise FileExistsError(errno.EEXIST, "there is a checkpoint of that name", url)
        self._put(manifest)
        require_newest(store.latest_attempt(job), job, attempt)  # else its list may have missed the manifest

    def _put(self, manifest: bytes) -> None:
        try:
            self._decided = True
            self._store.bucket.put_new(f"{self._job}/{self._folder.path}/{MANIFEST}", manifest)
        except Unanswered:
            raise
        except OSError:  # refused, so that no manifest will come of it
            self._decided = False
            raise

    def abort(self) -> None:
        if not self._decided:
            with contextlib.suppress(OSError):
                self._store.bucket.delete(f"{self._job}/{key}" for key in self._keys())

    def _keys(self) -> list[str]:
        """Of what was put here."""
        return self._store.keys_below(self._job, f"{self._folder.path}/") if self._told else self._folder.keys


class JoinedWriter(ObjectWriter):
    """Of another process than the one that has begun the checkpoint, and will commit or abort it."""

    def commit(self, manifest: bytes, *, replace: bool = False) -> None:
        raise AssertionError("a checkpoint is committed by the process that has begun it")

    def abort(self) -> None:
        """Nothing: what was written here may have been committed."""


def require_newest(newest: int, job: str, attempt: int) -> None:
    """Fenced when there is a newer one."""
    if newest > attempt:
        raise Fenced(f"attempt {newest} of {job} has started; attempt {attempt} commits nothing more")
