"""Objects under a prefix in a bucket: put, get, list, large uploads, ranges. Failures are OSErrors.

obstore makes the requests, on its own threads and without the interpreter lock. It retries requests that are safe
to retry after a 5xx, a cut connection or a timeout; the remaining retries that are safe are made here.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

from holdfast.errors import DamagedCheckpoint
from holdfast.store.base import Pace
from holdfast.system.masking import mask_text

if TYPE_CHECKING:
    from obstore import PutMode
    from obstore.store import AzureStore, GCSStore, S3Store

    Client = AzureStore | GCSStore | S3Store

PART_BYTES = 16 << 20
PARTS_IN_FLIGHT = 8
MOST_PARTS = 10_000
"""The most parts that every server accepts; a larger payload has larger parts."""
RANGE_BYTES = 16 << 20
PATIENCE_SECONDS = 30.0
COPY_SECONDS = 600.0
"""Most time that a server gets to complete a copy that it has accepted."""
_NOT_PARTIAL = "non-partial response"

T = TypeVar("T")
logger = logging.getLogger("holdfast")


class Unanswered(OSError):
    """No reliable response: the request may have taken effect, may take effect later, or never."""


class NoSuchObject(FileNotFoundError):
    """The bucket exists, the object does not."""


class Place(ABC):
    """A prefix in a bucket of a server, and how to connect to it; errors name all three."""

    noun = "bucket"
    """What the server calls a bucket."""
    copies_later = False
    """The server may answer a request for a copy before the copy exists."""
    most_copied_bytes = 5 << 40
    """Size of the largest object that the server copies in one request."""

    def __init__(self, url: str, bucket: str, prefix: str, server: str) -> None:
        self.url, self.bucket, self.prefix, self.server = url, bucket, prefix, server

    @abstractmethod
    def connect(self) -> tuple[Client, Client]:
        """Return the clients for requests and for transfers. OSError when there are no credentials."""

    @abstractmethod
    def explain(self, error: BaseException) -> OSError:
        """Convert an error of obstore to an OSError, NoSuchObject or Unanswered where it is one."""

    @abstractmethod
    def read_from_whole(self, client: Client, name: str, start: int, target: memoryview) -> None:
        """Read as `Bucket.read` from a server that ignores ranges and returns the whole object."""

    def copy_by_parts(self, source: str, target: str, size_bytes: int) -> bool:
        """Have the server copy an object that is too large for one request; False where it cannot."""
        return False

    def error(self, number: int, sentence: str, kind: type[OSError] = OSError, **more: str) -> OSError:
        named = f"{self.noun} {self.bucket}"
        return kind(number, sentence.format(bucket=named, server=self.server, **more), self.url)


class Bucket:
    """Objects under a prefix in a bucket. Connects when first used."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._process = os.getpid()
        self._random = random.Random()  # noqa: S311  # not the module's generator, whose state belongs to the training script
        self._takes_conditions = True
        self._answers_206 = True

    def sizes(self, prefix: str) -> dict[str, int]:
        """List the names below `prefix`, with their sizes, in order of the names."""
        import obstore

        with self._explained():
            batches = list(obstore.list(self._requests, prefix))
        return {found["path"]: found["size"] for batch in batches for found in batch}

    def folders(self, prefix: str = "") -> list[str]:
        """List the folders directly below `prefix`."""
        import obstore

        with self._explained():
            found = obstore.list_with_delimiter(self._requests, prefix or None)["common_prefixes"]
        return [path.rpartition("/")[2] for path in found]

    def get(self, name: str) -> bytes:
        """Return the bytes of an object. NoSuchObject when there is none."""
        import obstore

        def get() -> bytes:
            with self._explained():
                return bytes(obstore.get(self._requests, name).bytes())

        return self._persist(get)

    def put_new(self, name: str, data: bytes) -> None:
        """Create a small object unless an equal one exists; FileExistsError when a different one has its name.

        On a server without conditional requests the last writer wins: writers must use different names.
        """
        self._persist(lambda: self._put_new(name, data))

    def upload(self, name: str, parts: Sequence[memoryview | bytes], pace: Pace | None) -> None:
        """Put a large object from its parts with several concurrent requests, without copying them.

        The size of what the server stores is not checked.
        """
        size = sum(len(part) for part in parts)
        failed: list[BaseException] = []
        try:
            self._upload(name, _slices(parts, _part_bytes(size), pace, failed), size)
        except BaseException as error:  # raised again below, or its cause is
            if failed:
                raise failed[0] from None
            # the response to the last request may be lost, and a retry then finds no such upload
            if not (isinstance(error, Unanswered) and self._arrived(name, size)):
                raise

    def copy(self, source: str, target: str, size_bytes: int, *, only_on_server: bool = False) -> None:
        """Copy an object, on the server where it supports that. NoSuchObject when there is no such source.

        The size of the copy is not checked. With `only_on_server`, it is an OSError where the server cannot copy
        it.
        """
        if size_bytes > self.place.most_copied_bytes:
            is_copied = self.place.copy_by_parts(source, target, size_bytes)
        else:
            is_copied = self._copied(source, target)
        if not is_copied:
            if only_on_server:
                raise self.place.error(errno.EOPNOTSUPP, "{server} cannot copy {name} in {bucket}", name=source)
            self._upload(target, self._pieces(source, size_bytes), size_bytes)
        elif self.place.copies_later:
            self._await_copy(target, size_bytes)

    def require_size(self, name: str, size_bytes: int, found: int | None = None) -> None:
        """Raise an OSError unless an object has the size that was sent; without `found`, the server is asked."""
        found = self._size(name) if found is None else found
        if found != size_bytes:
            raise self.place.error(
                errno.EIO,
                "{server} received {size} bytes for {name} in {bucket}, but stores {found}",
                size=f"{size_bytes:,}", name=name, found=f"{found:,}",
            )  # fmt: skip

    def read(self, name: str, start: int, target: memoryview) -> None:
        """Fill `target` with the bytes from `start` on. Raises NoSuchObject; DamagedCheckpoint for a short one."""
        for at in range(0, len(target), RANGE_BYTES):
            piece = target[at : at + RANGE_BYTES]
            self._persist(lambda at=at, piece=piece: self._read(name, start + at, piece))  # type: ignore[misc]

    def delete(self, names: Iterable[str]) -> None:
        import obstore

        for name in names:
            # some servers refuse to delete what is not there, such as an object whose deletion was not answered
            with contextlib.suppress(NoSuchObject), self._explained():
                obstore.delete(self._requests, name)

    def wait(self, at_most_seconds: float) -> None:
        """Wait a random time, so that processes that collided do not retry at the same time."""
        time.sleep(self._random.uniform(0, at_most_seconds))

    def _put_new(self, name: str, data: bytes) -> None:
        import obstore
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        mode: PutMode = "create" if self._takes_conditions else "overwrite"
        try:
            with self._explained(AlreadyExistsError, PreconditionError):
                obstore.put(self._requests, name, data, mode=mode, use_multipart=False)
        except (AlreadyExistsError, PreconditionError):
            if self.get(name) != data:  # equal bytes come from an earlier try whose response was lost
                url = f"{self.place.url}/{name}"
                raise FileExistsError(errno.EEXIST, "an object of that name exists", url) from None
        except OSError as error:
            if error.errno != errno.ENOTSUP or mode == "overwrite":
                raise
            self._takes_conditions = False
            self._put_new(name, data)

    def _copied(self, source: str, target: str) -> bool:
        import obstore

        try:
            with self._explained():
                obstore.copy(self._transfers, source, target)
        except (NoSuchObject, Unanswered):
            raise
        except OSError as error:  # some servers do not support it
            logger.debug(
                "%s: the server cannot copy %s, copying it through this machine: %s", self.place.url, source, error
            )
            return False
        return True

    def _await_copy(self, name: str, size_bytes: int) -> None:
        """Wait for a copy that was accepted: until it is complete, the object is empty."""
        deadline, wait_seconds = time.monotonic() + COPY_SECONDS, 0.05
        while (found := self._size(name)) != size_bytes and time.monotonic() + wait_seconds < deadline:
            self.wait(wait_seconds)
            wait_seconds = min(2 * wait_seconds, 5)
        self.require_size(name, size_bytes, found)

    def _pieces(self, name: str, size_bytes: int) -> Iterator[memoryview]:
        for start in range(0, size_bytes, RANGE_BYTES):
            piece = memoryview(bytearray(min(RANGE_BYTES, size_bytes - start)))
            self.read(name, start, piece)
            yield piece

    def _upload(self, name: str, slices: Iterator[memoryview], size: int) -> None:
        import obstore

        with self._explained():
            if size <= PART_BYTES:
                obstore.put(self._transfers, name, b"".join(slices), use_multipart=False)
            else:
                obstore.put(
                    self._transfers, name, slices, chunk_size=_part_bytes(size), max_concurrency=PARTS_IN_FLIGHT
                )

    def _read(self, name: str, start: int, target: memoryview) -> None:
        import obstore

        if self._answers_206:
            try:
                with self._explained():
                    data = obstore.get_range(self._transfers, name, start=start, length=len(target))
            except OSError as error:
                if _NOT_PARTIAL not in str(error):
                    raise
                self._answers_206 = False
            else:
                if len(data) != len(target):
                    raise DamagedCheckpoint(f"{self.place.url}/{name}", f"ends at byte {start + len(data):,}")
                target[:] = memoryview(data)
                return
        self.place.read_from_whole(self._transfers, name, start, target)

    def _arrived(self, name: str, size: int) -> bool:
        try:
            return self._size(name) == size
        except OSError:
            return False

    def _size(self, name: str) -> int:
        import obstore

        with self._explained():
            return obstore.head(self._requests, name)["size"]

    @property
    def _requests(self) -> Client:
        return self._clients[0]

    @property
    def _transfers(self) -> Client:
        return self._clients[1]

    @cached_property
    def _clients(self) -> tuple[Client, Client]:
        return self.place.connect()

    @contextlib.contextmanager
    def _explained(self, *but: type[Exception]) -> Iterator[None]:
        from obstore.exceptions import BaseError

        if os.getpid() != self._process:
            raise self.place.error(
                errno.ENOTSUP,
                "{bucket} cannot be used after a fork: the threads of obstore exist in the parent only",
            )
        try:
            yield
        except but:
            raise
        except BaseException as error:  # a panic in Rust is not an Exception
            if not isinstance(error, (BaseError, FileNotFoundError)) and type(error).__name__ != "PanicException":
                raise
            logger.debug("%s: %s", self.place.url, mask_text(str(error)))  # a page long
            raise self.place.explain(error) from None

    def _persist(self, call: Callable[[], T]) -> T:
        """Retry an idempotent call for a while when it is unknown whether it took effect."""
        deadline, wait_seconds = time.monotonic() + PATIENCE_SECONDS, 0.1
        while True:
            try:
                return call()
            except Unanswered:
                if time.monotonic() + wait_seconds > deadline:
                    raise
            self.wait(wait_seconds)
            wait_seconds *= 2


def _part_bytes(size: int) -> int:
    """Return a whole number of MiB, so that few slices cross the parts of the payload."""
    return max(PART_BYTES, -(-size // MOST_PARTS >> 20) << 20)


def _slices(
    parts: Sequence[memoryview | bytes], slice_bytes: int, pace: Pace | None, failed: list[BaseException]
) -> Iterator[memoryview]:
    """Yield slices of `parts` as they are needed. An error of `pace` is added to `failed`."""
    try:
        for part in parts:
            for start in range(0, len(part), slice_bytes):
                piece = memoryview(part)[start : start + slice_bytes]
                if pace is not None:
                    pace(len(piece))
                yield piece
    except BaseException as error:  # `upload` raises it again: obstore replaces it by its own
        failed.append(error)
        raise
