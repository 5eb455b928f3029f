"""Writes one checkpoint to a store: the one function that every backend runs, in whatever process. No torch."""

from __future__ import annotations

import errno
import functools
import time

from holdfast import format as fmt
from holdfast.persist.beside import Beside
from holdfast.persist.task import Task, Written
from holdfast.store import CheckpointWriter, Store
from holdfast.store.base import Pace

PAYLOAD = "rank-0.safetensors"
UNSURE = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT}
"""Errors of a device or a file server after which nobody knows what of a file is on the disk. Asking for the
same file's fsync again may succeed and mean nothing, so the bytes are written once more, to a new file."""


def write_checkpoint(
    store: Store, task: Task, payload: memoryview, *, threads: bool, pace: Pace | None = None
) -> Written:
    """Write and commit; the payload must not change until this returns.

    Without `threads` everything is done on the calling thread, as a forked child must.

    Raises:
        Fenced, FileExistsError, OSError: as the store's writer does; nothing of the checkpoint is left.
    """
    writing = _Writing(store, task, payload, threads, pace)
    try:
        try:
            return Written(write_seconds=writing.attempt())
        except OSError as error:
            if error.errno not in UNSURE:
                raise
        return Written(write_seconds=writing.attempt(), tries=2)
    finally:
        writing.tensors.wait()


class _Writing:
    """One checkpoint, from its bytes to its commit, in one attempt or two."""

    def __init__(self, store: Store, task: Task, payload: memoryview, threads: bool, pace: Pace | None) -> None:
        self._store, self._task, self._payload = store, task, payload
        self._threads, self._pace = threads, pace
        names = {"job": task.origin.job, "iteration": str(task.iteration), "rank": "0"}
        self._header = fmt.payload_header(task.slots, names)
        self._replace = task.origin.replaces
        self.tensors = Beside("holdfast-digest", self._describe, threads=threads)

    def attempt(self) -> float:
        """Write to a new place and commit; the seconds that writing the payload took."""
        origin = self._task.origin
        size_bytes = len(self._header) + len(self._payload)
        writer = self._store.begin(origin.job, self._task.id, origin.attempt, size_bytes)
        try:
            started = time.perf_counter()
            writer.write(PAYLOAD, [self._header, self._payload], threads=self._threads, pace=self._pace)
            write_seconds = time.perf_counter() - started
            self._commit(writer, fmt.encode_manifest(self._manifest(write_seconds)))
        except BaseException:  # whatever it was, half a checkpoint must not stay; it is raised again
            writer.abort()
            raise
        return write_seconds

    def _commit(self, writer: CheckpointWriter, manifest: bytes) -> None:
        try:
            writer.commit(manifest, replace=self._replace)
        except OSError as error:
            # it may have become visible without being durable; then it is ours, and the next try replaces it
            self._replace = self._replace or error.errno in UNSURE
            raise

    def _describe(self) -> list[fmt.Tensor]:
        """What the manifest says of each tensor; reads all of the payload, for the digests."""
        views, opening, payload = self._task.views, len(self._header), self._payload
        found = []
        for slot in self._task.slots:
            whole, chunks = fmt.digest_tensor(payload[slot.start : slot.end])
            found.append(
                fmt.Tensor(
                    name=slot.name,
                    dtype=slot.dtype,
                    shape=slot.shape,
                    global_shape=slot.shape,
                    offsets=_zeros(len(slot.shape)),
                    file=PAYLOAD,
                    start=opening + slot.start,
                    end=opening + slot.end,
                    digest=whole,
                    chunks=chunks,
                    view=views.get(slot.name),
                )
            )
        return found

    def _manifest(self, write_seconds: float) -> fmt.Manifest:
        task, header = self._task, self._header
        file = fmt.File(
            name=PAYLOAD,
            size_bytes=len(header) + len(self._payload),
            header_bytes=len(header),
            header_digest=fmt.digest(header),
        )
        return fmt.Manifest(
            job=task.origin.job,
            iteration=task.iteration,
            lineage=task.lineage,
            attempt=task.origin.attempt,
            kind=task.kind,
            created_at=task.created_at,
            parent=task.origin.parent,
            world_size=task.origin.world_size,
            files=[file],
            tensors=self.tensors.result(),
            state=task.state,
            timings=task.timings | {"write_seconds": write_seconds},
            versions=task.origin.versions,
            fingerprint=task.origin.fingerprint,
        )


@functools.cache
def _zeros(dimensions: int) -> tuple[int, ...]:
    """The same tuple for all tensors: each new one would bring the garbage collector closer."""
    return (0,) * dimensions
