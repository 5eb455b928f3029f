"""Write one checkpoint to a store: the function that every backend runs. Does not import torch."""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import msgspec

from holdfast.errors import DamagedCheckpoint
from holdfast.format import manifest as fmt
from holdfast.format.shards import MergedRanks, RankShard
from holdfast.persist import completion_marker
from holdfast.persist.task import Task, Written
from holdfast.persist.unchanged import SUFFIX, LinkedFile, Unchanged, find_unchanged, is_enough
from holdfast.store import CheckpointWriter, Store
from holdfast.store.base import Pace
from holdfast.system import io_pool

logger = logging.getLogger("holdfast")

UNKNOWN_CONTENT_ERRORS = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT}
"""Errors of a device or file server after which the content on disk is unknown. A second fsync of the file may
succeed without writing, so the checkpoint is written again to new files."""


def write_checkpoint(
    store: Store,
    task: Task,
    payload: memoryview,
    *,
    pace: Pace | None = None,
    known: list[fmt.Tensor] | None = None,
) -> Written:
    """Write and commit a checkpoint, or write this rank's part of one that rank 0 began.

    Args:
        payload: the bytes, which must not change until this returns.
        pace: called with a number of bytes before they are written, and may wait.
        known: the manifest entries of the tensors, if already computed.

    Raises:
        Fenced, FileExistsError, OSError: as the store's writer does; the partial checkpoint is removed.
    """
    writing = _Writing(store, task, payload, pace, known)
    try:
        if task.origin.folder is not None:
            return writing.part(task.origin.folder)
        try:
            return Written(write_seconds=writing.attempt(find_unchanged(store, task, writing.tensors)))
        except OSError as error:
            if error.errno not in UNKNOWN_CONTENT_ERRORS:
                raise
        return Written(write_seconds=writing.attempt(Unchanged()), tries=2)
    finally:
        # the payload may change once this returns, also after an error
        concurrent.futures.wait([writing.tensors])


MIN_BYTES_PER_SECOND = 1e6
"""Lowest rate limit, so that every checkpoint becomes durable in a reasonable time."""


class RateLimiter:
    """A `Pace` that limits the average rate, for any number of threads.

    Each request waits until the earlier ones have used up their time at this rate; the first does not wait. `wait`
    waits a number of seconds, and returns True to lift the limit.
    """

    def __init__(
        self,
        bytes_per_second: float | None,
        wait: Callable[[float], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rate = None if bytes_per_second is None else max(bytes_per_second, MIN_BYTES_PER_SECOND)
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
            self._rate = None  # the limit was lifted


class _Writing:
    """The write of one checkpoint, in one or two tries."""

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
        self.tensors: Future[list[fmt.Tensor]] = io_pool.submit(self._describe_and_mark)

    def attempt(self, unchanged: Unchanged) -> float:
        """Write to a new folder and commit; return the seconds that the payload took."""
        origin = self._task.origin
        size_bytes = self._size_bytes - _linked_bytes(unchanged)
        writer = self._store.begin(origin.job, self._task.id, origin.attempt, size_bytes)
        try:
            part, write_seconds = self._write(writer, unchanged)
            whole = MergedRanks(files=part.files, tensors=part.tensors, state=part.state, rank_states={})
            manifest = manifest_of(self._task, whole, write_seconds)
            self._commit(writer, fmt.encode_manifest(manifest))
        except BaseException:  # also on Ctrl-C: remove the partial checkpoint
            writer.abort()
            raise
        return write_seconds

    def part(self, folder: str) -> Written:
        """Write this rank's files to the folder that rank 0 began, and make them durable."""
        origin = self._task.origin
        unchanged = find_unchanged(self._store, self._task, self.tensors)
        size_bytes = self._size_bytes - _linked_bytes(unchanged)
        writer = self._store.join(origin.job, self._task.id, origin.attempt, folder, size_bytes)
        part, write_seconds = self._write(writer, unchanged)
        writer.make_durable()
        return Written(write_seconds=write_seconds, part=part)

    @property
    def _size_bytes(self) -> int:
        return len(self._header) + len(self._payload)

    def _write(self, writer: CheckpointWriter, unchanged: Unchanged) -> tuple[RankShard, float]:
        """Link what is unchanged, and write the rest; return it, and the seconds that this took."""
        started = time.perf_counter()
        linked = [each for each in unchanged.links if self._link(writer, each)]
        placed = {tensor.name: tensor for each in linked for tensor in each.tensors}
        left = [slot for slot in self._task.slots if slot.name not in placed]
        # in a file of their own, which the next checkpoints can link
        apart = [slot for slot in left if slot.name in unchanged.names]
        if not is_enough(apart):
            apart = []
        if not (linked or apart):
            writer.write(self._file, [self._header, self._payload], pace=self._pace)
            seconds = time.perf_counter() - started
            return self._shard_of(self.tensors.result()), seconds
        names = {slot.name for slot in apart}
        own = self._write_some(writer, self._file, [slot for slot in left if slot.name not in names], placed)
        more = [self._write_some(writer, unchanged_of(self._task.origin.rank), apart, placed)] if apart else []
        seconds = time.perf_counter() - started
        tensors = [placed[slot.name] for slot in self._task.slots]
        return self._shard_of(tensors, own, [*(each.file for each in linked), *more]), seconds

    def _link(self, writer: CheckpointWriter, link: LinkedFile) -> bool:
        origin = self._task.origin
        assert origin.parent is not None
        try:
            writer.copy_file(origin.job, origin.parent, link.source, link.file.name, only_link=True)
        except (DamagedCheckpoint, OSError) as error:  # its tensors are written
            logger.debug("%s of %s is not linked: %s", link.source, origin.parent, error)
            return False
        return True

    def _write_some(
        self, writer: CheckpointWriter, name: str, slots: Sequence[fmt.TensorRange], placed: dict[str, fmt.Tensor]
    ) -> fmt.File:
        """Write some of the tensors to a file, and add their entries to `placed`.

        They stay in the order of the payload, which keeps them aligned.
        """
        known = {tensor.name: tensor for tensor in self.tensors.result()}
        at, moved, runs = 0, [], list[list[int]]()
        for slot in slots:
            end = at + slot.end - slot.start
            moved.append(msgspec.structs.replace(slot, start=at, end=end))
            if runs and runs[-1][1] == slot.start:
                runs[-1][1] = slot.end
            else:
                runs.append([slot.start, slot.end])
            at = end
        header = completion_marker.header_of(self._task, moved)
        writer.write(name, [header, *(self._payload[start:end] for start, end in runs)], pace=self._pace)
        for slot in moved:
            start, end = len(header) + slot.start, len(header) + slot.end
            placed[slot.name] = msgspec.structs.replace(known[slot.name], file=name, start=start, end=end)
        return _file(name, header, at)

    def _commit(self, writer: CheckpointWriter, manifest: bytes) -> None:
        try:
            writer.commit(manifest, replace=self._replace)
        except OSError as error:
            # the checkpoint may be visible but not durable: the next try must replace it
            self._replace = self._replace or error.errno in UNKNOWN_CONTENT_ERRORS
            raise

    def _describe_and_mark(self) -> list[fmt.Tensor]:
        tensors = self._describe() if self._known is None else self._known
        with contextlib.suppress(OSError):  # only a resume from memory needs the marker
            completion_marker.write_marker(self._task, self._shard_of(tensors))
        return tensors

    def _describe(self) -> list[fmt.Tensor]:
        """Return the manifest entry of each tensor; digests the payload."""
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
                    rank=rank if slot.name in task.rank_local else None,
                )
            )
        return found

    def _shard_of(
        self, tensors: list[fmt.Tensor], file: fmt.File | None = None, more_files: Sequence[fmt.File] = ()
    ) -> RankShard:
        task, file = self._task, file or _file(self._file, self._header, len(self._payload))
        return RankShard(
            rank=task.origin.rank, file=file, tensors=tensors, state=task.state, more_files=list(more_files)
        )


def manifest_of(task: Task, whole: MergedRanks, write_seconds: float) -> fmt.Manifest:
    """Build the manifest of the merged parts of all ranks."""
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
        metrics=task.metrics,
    )


def payload_of(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"rank-{rank}{SUFFIX}"


def unchanged_of(rank: int) -> str:
    """Return the name of a rank's file of tensors that equal those of the parent."""
    return f"rank-{rank}.unchanged{SUFFIX}"


def _file(name: str, header: bytes, payload_bytes: int) -> fmt.File:
    size_bytes = len(header) + payload_bytes
    return fmt.File(name=name, size_bytes=size_bytes, header_bytes=len(header), header_digest=fmt.digest(header))


def _linked_bytes(unchanged: Unchanged) -> int:
    return sum(tensor.end - tensor.start for link in unchanged.links for tensor in link.tensors)


def _stored(of_shard: tuple[int, ...], shape: tuple[int, ...], last: int = 2) -> tuple[int, ...]:
    """Add the dimension of a complex tensor that is stored as pairs of real numbers."""
    return of_shard if len(of_shard) == len(shape) else (*of_shard, last)


@functools.cache
def _zeros(dimensions: int) -> tuple[int, ...]:
    """Return one cached tuple per length: a new one per tensor would trigger the garbage collector more often."""
    return (0,) * dimensions
