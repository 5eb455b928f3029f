"""Write one checkpoint to a store, with what it is repaired from: parity files, copies of the manifest.

Does not import torch.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import functools
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec

from holdfast.checkpoint.manifest_copies import write_manifest_copies
from holdfast.distributed.error_transport import describe_error
from holdfast.errors import DamagedCheckpoint
from holdfast.format import manifest as fmt
from holdfast.format.encoding import Encoding, cut_blocks, encode_parts
from holdfast.format.parity_file import ParityCode, ParityFile, StripeLayout, build_parity
from holdfast.format.shards import MergedRanks, RankShard
from holdfast.save import completion_marker
from holdfast.save.reuse import Reuse, Task, Written, find_unchanged, stem_of
from holdfast.store import CheckpointWriter, Store
from holdfast.system import io_pool

UNKNOWN_CONTENT_ERRORS = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT}
"""Errors of a device or file server after which the content on disk is unknown. A second fsync of the file may
succeed without writing, so the checkpoint is written again to new files."""

PLAIN, ENCODED = ".safetensors", ".planes"
"""How the names of files end."""
ENCODED_FILE_BYTES = 256 << 20
"""Tensors that are encoded in one file, so that as much memory is enough; a larger one has a file to itself."""


def write_checkpoint(
    store: Store,
    task: Task,
    payload: memoryview,
    *,
    known: list[fmt.Tensor] | None = None,
) -> Written:
    """Write and commit a checkpoint, or write this rank's part of one that rank 0 began.

    Args:
        payload: the bytes, which must not change until this returns.
        known: the manifest entries of the tensors, if already computed.

    Raises:
        Fenced, FileExistsError, OSError: as the store's writer does; the partial checkpoint is removed.
    """
    writing = _Writing(store, task, payload, known)
    try:
        if task.origin.folder is not None:
            return writing.part(task.origin.folder)
        try:
            return writing.attempt(find_unchanged(store, task, writing.tensors))
        except OSError as error:
            if error.errno not in UNKNOWN_CONTENT_ERRORS:
                raise
        return writing.attempt(Reuse(), tries=2)
    finally:
        # the payload may change once this returns, also after an error
        concurrent.futures.wait([writing.tensors])


class _Writing:
    """The write of one checkpoint, in one or two tries."""

    def __init__(
        self,
        store: Store,
        task: Task,
        payload: memoryview,
        known: list[fmt.Tensor] | None,
    ) -> None:
        self._store, self._task, self._payload = store, task, payload
        self._header = completion_marker.header_of(task)
        self._file = f"{stem_of(task.origin.rank)}{PLAIN}"
        self._replace = task.origin.replaces
        self._known = known
        self._not_linked: str | None = None
        self._encode_seconds = 0.0
        self.tensors: Future[list[fmt.Tensor]] = io_pool.submit(self._describe_and_mark)

    def attempt(self, reuse: Reuse, tries: int = 1) -> Written:
        """Write to a new folder and commit."""
        origin = self._task.origin
        writer = self._store.begin(origin.job, self._task.id, origin.attempt, self._stored_bytes(reuse))
        try:
            part, write_seconds = self._write(writer, reuse)
            whole = MergedRanks(files=part.files, tensors=part.tensors, state=part.state, rank_states={})
            self._commit(writer, manifest_of(self._task, whole, write_seconds))
        except BaseException:  # also on Ctrl-C: remove the partial checkpoint
            writer.abort()
            raise
        return Written(write_seconds=write_seconds, tries=tries, files=part.files, **self._notes())

    def part(self, folder: str) -> Written:
        """Write this rank's files to the folder that rank 0 began, and make them durable."""
        origin = self._task.origin
        reuse = find_unchanged(self._store, self._task, self.tensors)
        size_bytes = self._stored_bytes(reuse)
        writer = self._store.join(origin.job, self._task.id, origin.attempt, folder, size_bytes)
        part, write_seconds = self._write(writer, reuse)
        writer.make_durable()
        return Written(write_seconds=write_seconds, part=part, **self._notes())

    def _notes(self) -> dict[str, Any]:
        return {"encode_seconds": self._encode_seconds, "not_linked": self._not_linked}

    def _stored_bytes(self, reuse: Reuse) -> int:
        code = self._task.origin.parity
        linked_bytes = sum(tensor.end - tensor.start for tensor in reuse.tensors.values())
        size_bytes = len(self._header) + len(self._payload) - linked_bytes
        return size_bytes + (StripeLayout(code, size_bytes).size_bytes if code is not None else 0)

    def _write(self, writer: CheckpointWriter, reuse: Reuse) -> tuple[RankShard, float]:
        """Link what can be reused and write the rest; return it, and the seconds that the payload took."""
        linked = [file for file in reuse.files if self._link(writer, file)]
        names = {file.name for file in linked}
        entries = {name: tensor for name, tensor in reuse.tensors.items() if tensor.file in names}
        apart = {*reuse.apart, *reuse.tensors} - entries.keys()
        if not (entries or apart or self._task.origin.compress):
            file, seconds = self._write_file(writer, self._file, self._header, [self._payload])
            return self._shard_of(self.tensors.result(), [file]), seconds
        files, total_seconds, slots = list[fmt.File](), 0.0, self._task.slots
        own = [slot for slot in slots if slot.name not in apart and slot.name not in entries]
        shared = [slot for slot in slots if slot.name in apart]
        rank = self._task.origin.rank
        for stem, held in (stem_of(rank), own), (stem_of(rank, self._task.id), shared):
            if not held and stem != stem_of(rank):
                continue
            for number, group in enumerate(self._groups(held)):
                moved, runs = _closed_up(group)
                header = completion_marker.header_of(self._task, moved)
                name = f"{stem}.{number}" if number else stem
                file, seconds = self._write_group(writer, name, header, group, runs)
                files.append(file)
                total_seconds += seconds
                entries |= self._entries(moved, file.name, len(header))
        return self._shard_of([entries[slot.name] for slot in slots], [*files, *linked]), total_seconds

    def _groups(self, slots: list[fmt.TensorRange]) -> list[list[fmt.TensorRange]]:
        """Return the tensors of each file: what is encoded is held in memory, so that such files are limited."""
        if not self._task.origin.compress:
            return [slots]
        groups: list[list[fmt.TensorRange]] = [[]]
        for slot in slots:
            if groups[-1] and slot.end - groups[-1][0].start > ENCODED_FILE_BYTES:
                groups.append([])
            groups[-1].append(slot)
        return groups

    def _write_group(
        self,
        writer: CheckpointWriter,
        stem: str,
        header: bytes,
        slots: Sequence[fmt.TensorRange],
        runs: Sequence[tuple[int, int]],
    ) -> tuple[fmt.File, float]:
        """Write a file, encoded where that is requested and makes it smaller."""
        if self._task.origin.compress:
            started = time.perf_counter()
            ranges = ((slot.start, slot.end, _number_bytes(slot.dtype)) for slot in slots)
            with contextlib.suppress(MemoryError):  # it is then written as it is
                parts, encoding = encode_parts(header, self._payload, cut_blocks(ranges))
                if encoding is not None:
                    self._encode_seconds += time.perf_counter() - started
                    return self._write_file(writer, f"{stem}{ENCODED}", header, parts, encoding)
            self._encode_seconds += time.perf_counter() - started
        return self._write_file(writer, f"{stem}{PLAIN}", header, [self._payload[a:b] for a, b in runs])

    def _link(self, writer: CheckpointWriter, file: fmt.File) -> bool:
        """Link a file of the parent and its parity file. If that fails, its tensors are written."""
        job, parent = self._task.origin.job, self._task.origin.parent
        assert parent is not None
        try:
            with self._store.open_file(job, parent, file.name) as opened:
                fmt.check_size(file, opened.size_bytes)
            writer.copy_file(job, parent, file.name, only_link=True)
            if file.parity is not None:
                writer.copy_file(job, parent, file.parity.name, only_link=True)
        except (DamagedCheckpoint, OSError) as error:
            self._not_linked = f"{file.name} of {parent} could not be linked: {describe_error(error)}"
            return False
        return True

    def _write_file(
        self,
        writer: CheckpointWriter,
        name: str,
        header: bytes,
        payload: Sequence[memoryview | bytes],
        encoding: Encoding | None = None,
    ) -> tuple[fmt.File, float]:
        """Write a file and its parity file; return its entry, and the seconds without parity.

        The payload of an encoded file includes the header.
        """
        parts = payload if encoding is not None else [header, *payload]
        started = time.perf_counter()
        writer.write(name, parts)
        seconds = time.perf_counter() - started
        parity = write_parity(writer, self._task.origin.parity, name, parts)
        entry = _file(name, header, sum(map(len, parts)))
        return msgspec.structs.replace(entry, parity=parity, encoding=encoding), seconds

    def _entries(self, slots: Sequence[fmt.TensorRange], name: str, header_bytes: int) -> dict[str, fmt.Tensor]:
        """Return the manifest entries of tensors that are in the file `name`, behind its header."""
        known = {tensor.name: tensor for tensor in self.tensors.result()}
        return {
            slot.name: msgspec.structs.replace(
                known[slot.name], file=name, start=header_bytes + slot.start, end=header_bytes + slot.end
            )
            for slot in slots
        }

    def _commit(self, writer: CheckpointWriter, manifest: fmt.Manifest) -> None:
        data = fmt.encode_manifest(manifest)
        write_manifest_copies(writer, manifest, data)
        try:
            writer.commit(data, replace=self._replace)
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

    def _shard_of(self, tensors: list[fmt.Tensor], files: Sequence[fmt.File] = ()) -> RankShard:
        """Return this rank's part, by default in one file without parity, as it is in memory."""
        task = self._task
        file, *more = files or [_file(self._file, self._header, len(self._header) + len(self._payload))]
        return RankShard(rank=task.origin.rank, file=file, tensors=tensors, state=task.state, more_files=more)


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


def _file(name: str, header: bytes, size_bytes: int) -> fmt.File:
    return fmt.File(name=name, size_bytes=size_bytes, header_bytes=len(header), header_digest=fmt.digest(header))


def _number_bytes(dtype: str) -> int:
    """Return the size of an element, or of each part of a complex one."""
    return 4 if dtype == "C64" else fmt.ITEM_BYTES[dtype]


def _closed_up(slots: Iterable[fmt.TensorRange]) -> tuple[list[fmt.TensorRange], list[tuple[int, int]]]:
    """Return slots without the space between them, and the ranges of the payload that they are in.

    The order stays, which keeps tensors aligned.
    """
    at, moved, runs = 0, list[fmt.TensorRange](), list[tuple[int, int]]()
    for slot in slots:
        end = at + slot.end - slot.start
        moved.append(msgspec.structs.replace(slot, start=at, end=end))
        start = runs.pop()[0] if runs and runs[-1][1] == slot.start else slot.start
        runs.append((start, slot.end))
        at = end
    return moved, runs


def _stored(of_shard: tuple[int, ...], shape: tuple[int, ...], last: int = 2) -> tuple[int, ...]:
    """Add the dimension of a complex tensor that is stored as pairs of real numbers."""
    return of_shard if len(of_shard) == len(shape) else (*of_shard, last)


@functools.cache
def _zeros(dimensions: int) -> tuple[int, ...]:
    """Return one cached tuple per length: a new one per tensor would trigger the garbage collector more often."""
    return (0,) * dimensions


def write_parity(
    writer: CheckpointWriter,
    code: ParityCode | None,
    payload: str,
    parts: Sequence[memoryview | bytes],
) -> ParityFile | None:
    """Compute and write the parity file of a payload file, whose bytes are `parts`; None without a code.

    Raises what `CheckpointWriter.write` does.
    """
    if code is None:
        return None
    found, entry = build_parity(code, payload, parts)
    writer.write(entry.name, [found])
    return entry
