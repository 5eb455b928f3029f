"""Write one checkpoint to a store, with its parity files and copies of the manifest.

Does not import torch.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import functools
import logging
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from holdfast.checkpoint.stored_manifest import commit, copies_of, has_copies, write_part
from holdfast.errors import DamagedCheckpoint, describe_error
from holdfast.format import manifest as fmt
from holdfast.format.encoding import Encoding
from holdfast.format.manifest_files import (
    ManifestFile,
    StoredPart,
    encode_index,
    encode_structure,
    index_name,
    index_of,
    part_of,
    rank_entry,
    structure_name,
    structure_of,
)
from holdfast.save.draft import Draft, manifest_file_of
from holdfast.save.reuse import Reuse, find_unchanged, stem_of
from holdfast.store import CheckpointWriter, Store
from holdfast.system import io_pool

if TYPE_CHECKING:
    from holdfast.incremental.planner import IncrementalPlanner
    from holdfast.save.host_state import HostImage
    from holdfast.save.layered_files import LayeredFiles
    from holdfast.store.base import Pace

logger = logging.getLogger("holdfast")

UNKNOWN_CONTENT_ERRORS = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT}
"""Errors of a device or file server after which the content on disk is unknown. A second fsync of the file may
succeed without writing, so the checkpoint is written again to new files."""

PLAIN = ".safetensors"
"""Suffix of the names of plain files."""
ENCODED_FILE_BYTES = 256 << 20
"""Most bytes of tensors that are encoded in one file, which limits memory; a larger tensor has its own file."""


def write_checkpoint(
    store: Store,
    draft: Draft,
    payload: memoryview,
    marker: Path | None = None,
    planner: IncrementalPlanner | None = None,
    image: HostImage | None = None,
    *,
    pace: Pace | None = None,
) -> Draft:
    """Write and commit a checkpoint, or write this rank's part of one that rank 0 began.

    Args:
        draft: with `tensors` where they are known, as from a completion marker.
        payload: the bytes, which must not change until this returns.
        marker: path of the completion marker; None if the memory does not outlive the process.
        planner: decides which tensors are written in part; without it, all are written in full.
        image: tensors that are not among the bytes, and that a forked child writes.
        pace: limits the rate of what is written.

    Returns:
        The draft with what was written.

    Raises:
        Fenced, FileExistsError, OSError: as the store's writer does; the partial checkpoint is removed.
    """
    writing = CheckpointFiles(store, draft, payload, marker, image, pace)
    try:
        layered = _plan_layers(planner, draft, payload)
        whole = draft
        if layered is not None:
            whole = msgspec.structs.replace(draft, unchanged=draft.unchanged - layered.names)
        reuse = find_unchanged(store, whole, writing.tensors)
        try:
            if draft.folder is not None:
                return writing.part(draft.folder, reuse, layered)
            return writing.attempt(reuse, layered)
        except OSError as error:
            if error.errno not in UNKNOWN_CONTENT_ERRORS:
                raise
            if planner is not None:  # what was linked may be damaged, and the second try has no layered files
                planner.begin_anew()
            if image is not None:
                image.begin_anew()
            if draft.folder is not None:
                raise
        return writing.attempt(Reuse(), None)
    finally:
        # the payload may change once this returns, also after an error
        concurrent.futures.wait([writing.tensors])


def _plan_layers(planner: IncrementalPlanner | None, draft: Draft, payload: memoryview) -> LayeredFiles | None:
    if planner is None:
        return None
    from holdfast.save.layered_files import plan_layers

    return plan_layers(planner, draft, payload)


@functools.cache
def _warn_once(what: str) -> None:
    logger.warning(what, exc_info=True)


class CheckpointFiles:
    """The write of one checkpoint, in one or two tries."""

    def __init__(
        self,
        store: Store,
        draft: Draft,
        payload: memoryview,
        marker: Path | None = None,
        image: HostImage | None = None,
        pace: Pace | None = None,
    ) -> None:
        self._store, self._draft, self._payload, self._marker = store, draft, payload, marker
        self._image, self._pace = image, pace
        self._header = draft.header()
        self._file = f"{stem_of(draft.rank)}{PLAIN}"
        self._replace = draft.replaces
        self._not_linked: str | None = None
        self._encode_seconds = 0.0
        self.tensors: Future[list[fmt.Tensor]] = io_pool.submit(self._describe_and_mark)

    def attempt(self, reuse: Reuse, layered: LayeredFiles | None) -> Draft:
        """Write to a new folder and commit."""
        draft = self._draft
        writer = self._store.begin(draft.job, draft.id, draft.attempt, self._stored_bytes(reuse, layered))
        try:
            written = self._write_image(writer, self._write(writer, reuse, layered))
            self._commit(writer, manifest_file_of(written))
        except BaseException:  # also on Ctrl-C: remove the partial checkpoint
            writer.abort()
            raise
        return written

    def part(self, folder: str, reuse: Reuse, layered: LayeredFiles | None) -> Draft:
        """Write this rank's files to the folder that rank 0 began, and make them durable."""
        draft = self._draft
        size_bytes = self._stored_bytes(reuse, layered)
        writer = self._store.join(draft.job, draft.id, draft.attempt, folder, size_bytes)
        written = self._write_image(writer, self._write(writer, reuse, layered))
        index = encode_index(index_of(written.files, written.tensors, written.own_state))
        write_part(writer, index_name(draft.rank), index, copied=has_copies(written.files))
        structure = self._link_or_write_structure(writer, written)
        writer.make_durable()
        return msgspec.structs.replace(written, index=rank_entry(index, structure, written.files))

    def _link_or_write_structure(self, writer: CheckpointWriter, written: Draft) -> StoredPart:
        """Link this rank's structure and its copies from the parent if that has the same, or write them."""
        data = encode_structure(list(map(structure_of, written.tensors)))
        part = part_of(data)
        name = structure_name(part, written.rank)
        for each in (name, *(copies_of(name) if has_copies(written.files) else ())):
            if not self._link_from_parent(writer, each, len(data)):
                writer.write(each, [data])
        return part

    def _link_from_parent(self, writer: CheckpointWriter, name: str, size_bytes: int) -> bool:
        job, parent = self._draft.job, self._draft.parent
        if parent is None or not self._draft.may_link:
            return False
        try:
            writer.copy_file(job, parent, name, only_link=True, size_bytes=size_bytes)
        except (DamagedCheckpoint, OSError):
            return False
        return True

    def _stored_bytes(self, reuse: Reuse, layered: LayeredFiles | None) -> int:
        code = self._draft.parity
        linked_bytes = sum(tensor.end - tensor.start for tensor in reuse.tensors.values())
        linked_bytes += layered.linked_bytes if layered is not None else 0
        size_bytes = len(self._header) + len(self._payload) - linked_bytes
        size_bytes += self._image.size_bytes if self._image is not None else 0
        if code is None:
            return size_bytes
        from holdfast.format.parity_stripes import parity_bytes  # few jobs have parity

        return size_bytes + parity_bytes(code, size_bytes)

    def _write(self, writer: CheckpointWriter, reuse: Reuse, layered: LayeredFiles | None) -> Draft:
        """Link what can be reused and write the rest."""
        linked = [file for file in reuse.files if self.link(writer, file, self._draft.parent)]
        names = {file.name for file in linked}
        entries = {name: tensor for name, tensor in reuse.tensors.items() if tensor.file in names}
        apart = {*reuse.apart, *reuse.tensors} - entries.keys()
        if not (entries or apart or self._draft.compress or layered):
            file, seconds = self.write_file(writer, self._file, self._header, self._draft.slots, [self._payload])
            return self._written([file], self.tensors.result(), seconds)
        files, total_seconds, slots = list[fmt.File](), 0.0, self._draft.slots
        if layered is not None:
            files, placed, total_seconds = layered.write(self, writer)
            entries |= placed
        own = [slot for slot in slots if slot.name not in apart and slot.name not in entries]
        shared = [slot for slot in slots if slot.name in apart]
        rank = self._draft.rank
        for stem, held in (stem_of(rank), own), (stem_of(rank, self._draft.id), shared):
            if not held and stem != stem_of(rank):
                continue
            for number, group in enumerate(self._groups(held)):
                moved, runs = closed_up(group)
                header = self._draft.header(moved)
                name = f"{stem}.{number}" if number else stem
                file, seconds = self._write_group(writer, name, header, moved, group, runs)
                files.append(file)
                total_seconds += seconds
                entries |= self.entries(moved, file.name, len(header))
        return self._written([*files, *linked], [entries[slot.name] for slot in slots], total_seconds)

    def _written(self, files: list[fmt.File], tensors: list[fmt.Tensor], write_seconds: float) -> Draft:
        return msgspec.structs.replace(
            self._draft,
            files=files,
            tensors=tensors,
            timings=self._draft.timings | {"write_seconds": write_seconds},
            encode_seconds=self._encode_seconds,
            not_linked=self._not_linked,
        )

    def _write_image(self, writer: CheckpointWriter, written: Draft) -> Draft:
        """Have the forked child write its tensors, and add them to what was written."""
        if self._image is None:
            return written
        return self._image.add_to(written, writer, self, self._entry, self._pace)

    def _groups(self, slots: list[fmt.TensorRange]) -> list[list[fmt.TensorRange]]:
        """Return the tensors of each file. Encoded files are limited in size, since they are held in memory."""
        if not self._draft.compress:
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
        moved: Sequence[fmt.TensorRange],
        slots: Sequence[fmt.TensorRange],
        runs: Sequence[tuple[int, int]],
    ) -> tuple[fmt.File, float]:
        """Write a file, encoded where that is requested and makes it smaller."""
        if self._draft.compress:
            with contextlib.suppress(MemoryError):  # it is then written as it is
                if (encoded := self._encoded(header, slots)) is not None:
                    suffix, parts, encoding = encoded
                    return self.write_file(writer, f"{stem}{suffix}", header, moved, parts, encoding)
        pieces = [self._payload[start:end] for start, end in runs]
        return self.write_file(writer, f"{stem}{PLAIN}", header, moved, pieces)

    def _encoded(
        self, header: bytes, slots: Sequence[fmt.TensorRange]
    ) -> tuple[str, Sequence[memoryview | bytes], Encoding] | None:
        """Encode a file; return the suffix of its name, its bytes and their description. None: it stays plain."""
        from holdfast.format.file_transforms import cut_blocks, encode_parts, file_transform  # few jobs compress

        started, name = time.perf_counter(), self._draft.transform
        ranges = ((slot.start, slot.end, _number_bytes(slot.dtype)) for slot in slots)
        try:
            parts, encoding = encode_parts(name, header, self._payload, cut_blocks(ranges))
            return None if encoding is None else (file_transform(name).suffix, parts, encoding)
        except MemoryError:
            raise
        except Exception:  # of another package, which may raise anything
            _warn_once(f"the file transform {name} fails, so files are written as they are")
            return None
        finally:
            self._encode_seconds += time.perf_counter() - started

    def link(self, writer: CheckpointWriter, file: fmt.File, source: str | None) -> bool:
        """Link a file of the checkpoint `source` and its parity file. If that fails, its tensors are written."""
        job, parent = self._draft.job, source
        assert parent is not None
        try:
            writer.copy_file(job, parent, file.name, only_link=True, size_bytes=file.size_bytes)
            if file.parity is not None:
                writer.copy_file(job, parent, file.parity.name, only_link=True)
        except (DamagedCheckpoint, OSError) as error:
            self._not_linked = f"{file.name} of {parent} could not be linked: {describe_error(error)}"
            return False
        return True

    def write_file(
        self,
        writer: CheckpointWriter,
        name: str,
        header: bytes,
        slots: Sequence[fmt.TensorRange],
        payload: Sequence[memoryview | bytes],
        encoding: Encoding | None = None,
    ) -> tuple[fmt.File, float]:
        """Write a file and its parity file; return its entry, and the seconds without parity.

        The payload of an encoded file includes the header.
        """
        parts = payload if encoding is not None else [header, *payload]
        started = time.perf_counter()
        writer.write(name, parts, pace=self._pace)
        seconds = time.perf_counter() - started
        entry = msgspec.structs.replace(file_of(name, header, sum(map(len, parts))), encoding=encoding)
        if self._draft.parity is not None:
            from holdfast.save.parity import with_parity  # few jobs have it

            entry = with_parity(writer, self._draft.parity, entry, parts, slots, self._pace)
        return entry, seconds

    def entries(self, slots: Sequence[fmt.TensorRange], name: str, header_bytes: int) -> dict[str, fmt.Tensor]:
        """Return the manifest entries of tensors that are in the file `name`, behind its header."""
        known = {tensor.name: tensor for tensor in self.tensors.result()}
        return {
            slot.name: msgspec.structs.replace(
                known[slot.name], file=name, start=header_bytes + slot.start, end=header_bytes + slot.end
            )
            for slot in slots
        }

    def _commit(self, writer: CheckpointWriter, manifest: ManifestFile) -> None:
        try:
            commit(writer, manifest, replace=self._replace)
        except OSError as error:
            # the checkpoint may be visible but not durable: the next try must replace it
            self._replace = self._replace or error.errno in UNKNOWN_CONTENT_ERRORS
            raise

    def _describe_and_mark(self) -> list[fmt.Tensor]:
        tensors = self._draft.tensors or self._describe()
        if self._marker is not None:
            from holdfast.save import completion_marker  # only under a supervisor

            file = file_of(self._file, self._header, len(self._header) + len(self._payload))
            with contextlib.suppress(OSError):  # only a resume from memory needs the marker
                draft = msgspec.structs.replace(self._draft, files=[file], tensors=tensors)
                completion_marker.write_marker(self._marker, draft)
        return tensors

    def _describe(self) -> list[fmt.Tensor]:
        """Return the manifest entry of each tensor; digests the payload."""
        slots, opening = self._draft.slots, len(self._header)
        digests = list(map(fmt.digest_tensor, [self._payload[slot.start : slot.end] for slot in slots]))
        return [self._entry(slot, self._file, opening, *each) for slot, each in zip(slots, digests, strict=True)]

    def _entry(
        self, slot: fmt.TensorRange, file: str, opening: int, digest: str, chunks: list[str] | None
    ) -> fmt.Tensor:
        """Return the manifest entry of a tensor in a file, `opening` bytes behind its place in the payload."""
        draft = self._draft
        shard = draft.shards.get(slot.name) if draft.shards else None
        return fmt.Tensor(
            name=slot.name,
            dtype=slot.dtype,
            shape=slot.shape,
            global_shape=slot.shape if shard is None else _stored(shard.global_shape, slot.shape),
            offsets=fmt.zeros(len(slot.shape)) if shard is None else _stored(shard.offsets, slot.shape, 0),
            file=file,
            start=opening + slot.start,
            end=opening + slot.end,
            digest=digest,
            chunks=chunks,
            view=draft.views.get(slot.name),
            rank=draft.rank if slot.name in draft.rank_local else None,
        )


def file_of(name: str, header: bytes, size_bytes: int) -> fmt.File:
    return fmt.File(name=name, size_bytes=size_bytes, header_bytes=len(header), header_digest=fmt.digest(header))


def _number_bytes(dtype: str) -> int:
    """Return the size of an element, or of each part of a complex one."""
    return 4 if dtype == "C64" else fmt.ITEM_BYTES[dtype]


def closed_up(slots: Iterable[fmt.TensorRange]) -> tuple[list[fmt.TensorRange], list[tuple[int, int]]]:
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
