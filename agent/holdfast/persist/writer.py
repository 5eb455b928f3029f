"""Writes one checkpoint to a store: the one function that every backend runs, in whatever process. No torch."""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import functools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from holdfast.format import manifest as fmt
from holdfast.format.shards import RankShard, Whole
from holdfast.persist import completion_marker
from holdfast.persist.task import Task, Written
from holdfast.store import CheckpointWriter, Store
from holdfast.store.base import Pace
from holdfast.system import io_pool

UNSURE = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT}
"""Errors of a device or a file server after which nobody knows what of a file is on the disk. Asking for the
same file's fsync again may succeed and mean nothing, so the bytes are written once more, to a new file."""


def write_checkpoint(
    store: Store,
    task: Task,
    payload: memoryview,
    *,
    pace: Pace | None = None,
    known: list[fmt.Tensor] | None = None,
) -> Written:
    """Write and commit, or write this rank's part; the payload must not change until this returns.

    `known` is what the manifest says of each tensor, where that was found out before.

    Raises:
        Fenced, FileExistsError, OSError: as the store's writer does; nothing of the checkpoint is left.
    """
    writing = _Writing(store, task, payload, pace, known)
    try:
        if task.origin.place is not None:
            return writing.part(task.origin.place)
        try:
            return Written(write_seconds=writing.attempt())
        except OSError as error:
            if error.errno not in UNSURE:
                raise
        return Written(write_seconds=writing.attempt(), tries=2)
    finally:
        # the payload may change from here on, whatever has become of the writing
        concurrent.futures.wait([writing.tensors])


LEAST_BYTES_PER_SECOND = 1e6
"""No rate is lower than this: a checkpoint that never gets durable protects nobody."""


class RateLimiter:
    """A `Pace` that lets so many bytes through a second, on average.

    Several threads may share it. A stretch of bytes waits until those before it are paid for, so the first goes
    at once and the longest wait is that for one stretch a thread.
    """

    def __init__(
        self,
        bytes_per_second: float | None,
        wait: Callable[[float], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rate = None if bytes_per_second is None else max(bytes_per_second, LEAST_BYTES_PER_SECOND)
        self._wait, self._clock = wait, clock
        self._lock = threading.Lock()
        self._paid_at = 0.0

    def __call__(self, size_bytes: int, /) -> None:
        if self._rate is None:
            return
        with self._lock:
            now = self._clock()
            begins_at = max(now, self._paid_at)
            self._paid_at = begins_at + size_bytes / self._rate
        if begins_at > now and self._wait(begins_at - now):
            self._rate = None  # lifted: somebody waits for the end


class _Writing:
    """One checkpoint, from its bytes to its commit, in one attempt or two."""

    def __init__(
        self,
        store: Store,
        task: Task,
        payload: memoryview,
        pace: Pace | None,
        known: list[fmt.Tensor] | None,
    ) -> None:
        self._store, self._task, self._payload = store, task, payload
        self._pace = pace
        origin = task.origin
        self._header = completion_marker.header_of(task)
        self._file = payload_of(origin.rank)
        self._replace = task.origin.replaces
        self._known = known
        self.tensors: Future[list[fmt.Tensor]] = io_pool.submit(self._sealed)

    def attempt(self) -> float:
        """Write to a new place and commit; the seconds that writing the payload took."""
        origin = self._task.origin
        writer = self._store.begin(origin.job, self._task.id, origin.attempt, self._size_bytes)
        try:
            write_seconds = self._write(writer)
            part = self._described()
            whole = Whole(files=[part.file], tensors=part.tensors, state=part.state, rank_states={})
            manifest = manifest_of(self._task, whole, write_seconds)
            self._commit(writer, fmt.encode_manifest(manifest))
        except BaseException:  # whatever it was, half a checkpoint must not stay; it is raised again
            writer.abort()
            raise
        return write_seconds

    def part(self, place: str) -> Written:
        """Write into what rank 0 has begun, for it to commit."""
        origin = self._task.origin
        writer = self._store.join(origin.job, self._task.id, origin.attempt, place, self._size_bytes)
        write_seconds = self._write(writer)
        writer.settle()
        return Written(write_seconds=write_seconds, part=self._described())

    @property
    def _size_bytes(self) -> int:
        return len(self._header) + len(self._payload)

    def _write(self, writer: CheckpointWriter) -> float:
        started = time.perf_counter()
        writer.write(self._file, [self._header, self._payload], pace=self._pace)
        return time.perf_counter() - started

    def _commit(self, writer: CheckpointWriter, manifest: bytes) -> None:
        try:
            writer.commit(manifest, replace=self._replace)
        except OSError as error:
            # it may have become visible without being durable; then it is ours, and the next try replaces it
            self._replace = self._replace or error.errno in UNSURE
            raise

    def _sealed(self) -> list[fmt.Tensor]:
        tensors = self._describe() if self._known is None else self._known
        with contextlib.suppress(OSError):  # a death finds no memory of it then; it is written all the same
            completion_marker.seal(self._task, self._part(tensors))
        return tensors

    def _describe(self) -> list[fmt.Tensor]:
        """What the manifest says of each tensor; reads all of the payload, for the digests."""
        task, opening, payload = self._task, len(self._header), self._payload
        rank = task.origin.rank
        found = []
        for slot in task.slots:
            whole, chunks = fmt.digest_tensor(payload[slot.start : slot.end])
            shard = task.shards.get(slot.name) if task.shards else None
            found.append(
                fmt.Tensor(
                    name=slot.name,
                    dtype=slot.dtype,
                    shape=slot.shape,
                    global_shape=slot.shape if shard is None else _stored(shard.global_shape, slot.shape),
                    offsets=_zeros(len(slot.shape)) if shard is None else _stored(shard.offsets, slot.shape, 0),
                    file=self._file,
                    start=opening + slot.start,
                    end=opening + slot.end,
                    digest=whole,
                    chunks=chunks,
                    view=task.views.get(slot.name),
                    rank=rank if slot.name in task.own else None,
                )
            )
        return found

    def _described(self) -> RankShard:
        return self._part(self.tensors.result())

    def _part(self, tensors: list[fmt.Tensor]) -> RankShard:
        header = self._header
        file = fmt.File(
            name=self._file,
            size_bytes=self._size_bytes,
            header_bytes=len(header),
            header_digest=fmt.digest(header),
        )
        task = self._task
        return RankShard(rank=task.origin.rank, file=file, tensors=tensors, state=task.state)


def manifest_of(task: Task, whole: Whole, write_seconds: float) -> fmt.Manifest:
    """What is written last, of all that was written before."""
    return fmt.Manifest(
        job=task.origin.job,
        iteration=task.iteration,
        lineage=task.lineage,
        attempt=task.origin.attempt,
        kind=task.kind,
        created_at=task.created_at,
        parent=task.origin.parent,
        world_size=task.origin.world_size,
        files=whole.files,
        tensors=whole.tensors,
        state=whole.state,
        rank_states=whole.rank_states,
        timings=task.timings | {"write_seconds": write_seconds},
        versions=task.origin.versions,
        fingerprint=task.fingerprint,
    )


def payload_of(rank: int) -> str:
    """The name of a rank's file."""
    return f"rank-{rank}.safetensors"


def _stored(of_shard: tuple[int, ...], shape: tuple[int, ...], last: int = 2) -> tuple[int, ...]:
    """A complex number is stored as a pair: one dimension more."""
    return of_shard if len(of_shard) == len(shape) else (*of_shard, last)


@functools.cache
def _zeros(dimensions: int) -> tuple[int, ...]:
    """The same tuple for all tensors: each new one would bring the garbage collector closer."""
    return (0,) * dimensions
