"""Writes forked host state in part: the child hashes the pages of its image, and returns those that changed."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec
import torch

from holdfast.format import manifest as fmt
from holdfast.format.manifest import TensorRange, tensor_digests
from holdfast.incremental.layered_file import BASE_SUFFIX, base_encoding, masked_header
from holdfast.incremental.planner import IncrementalPlanner, LayeredWrite, leaf_bytes_in
from holdfast.incremental.region_file import runs_of
from holdfast.incremental.row_hashes import MOST_LEAF_BYTES, tree_over
from holdfast.save.draft import Draft
from holdfast.save.layered_files import LayeredFiles, warn_once
from holdfast.save.writer import file_of
from holdfast.store import CheckpointWriter

if TYPE_CHECKING:
    from holdfast.save.host_state import HostImage
    from holdfast.save.writer import CheckpointFiles

Entry = Callable[[TensorRange, str, int, str, list[str] | None], fmt.Tensor]
"""Makes a manifest entry: place of the tensor in the payload, file, size of its header, digests."""
Digests = dict[str, tuple[str, list[str] | None]]
_SEED = secrets.randbits(63)


class ForkedRows(LayeredFiles):
    """The layered files of the arrays of an image."""

    def __init__(
        self,
        planner: IncrementalPlanner,
        draft: Draft,
        image: HostImage,
        planned: LayeredWrite,
        entry: Entry,
        digests: Digests,
    ) -> None:
        super().__init__(planner, msgspec.structs.replace(draft, slots=image.slots), memoryview(b""), planned)
        self._image, self._entry, self._digests = image, entry, digests
        self._stem += ".host"
        self._numbers = {slot.name: number for number, slot in enumerate(image.slots)}

    def _write_base(
        self,
        files: CheckpointFiles,
        writer: CheckpointWriter,
        slots: Sequence[TensorRange],
        moved: Sequence[TensorRange],
    ) -> tuple[fmt.File, float]:
        started = time.perf_counter()
        name, header = f"{self._stem}{BASE_SUFFIX}", self._draft.header(moved)
        tensors, masked = self._entries(files, moved, name, len(header)), masked_header(header)
        self._image.write(writer, name, masked, slots)
        encoding = base_encoding(masked, [tensors[slot.name] for slot in moved])
        file = file_of(name, header, len(header) + moved[-1].end)
        return msgspec.structs.replace(file, encoding=encoding), time.perf_counter() - started

    def _entries(
        self, files: CheckpointFiles, slots: Sequence[TensorRange], name: str, header_bytes: int
    ) -> dict[str, fmt.Tensor]:
        return {slot.name: self._entry(slot, name, header_bytes, *self._digests[slot.name]) for slot in slots}

    def _rows(self, slot: TensorRange, leaves: torch.Tensor) -> list[memoryview]:
        size, total = leaf_bytes_in(slot), slot.end - slot.start
        runs = runs_of(leaves.numpy()).tolist()
        parts = [(first * size, min((first + count) * size, total)) for first, count in runs]
        return [self._image.child.read(self._numbers[slot.name], parts)]


def plan_forked_rows(
    planner: IncrementalPlanner, image: HostImage, draft: Draft, entry: Entry
) -> ForkedRows | None:
    """Return the layered files of the arrays of an image; None if all of it is written as usual.

    Raises ImageLost.
    """
    planner.settle(draft.id, is_durable=False)  # drop the plan of an earlier try
    if planner.passes():
        return None
    slots = [_in_pages(slot) for slot in image.slots]
    try:
        chunks, hashes = image.child.hash_leaves([leaf_bytes_in(slot) for slot in slots], _SEED)
        trees = {
            slot.name: tree_over(torch.frombuffer(found, dtype=torch.int64))
            for slot, found in zip(slots, hashes, strict=True)
        }
        planned = planner.plan(draft.lineage, slots, trees, set(), may_link=draft.may_link)
    except (MemoryError, RuntimeError):  # also of torch: a plan only saves space
        warn_once()
        return None
    if planned is None:
        return None
    digests = {slot.name: tensor_digests(found) for slot, found in zip(slots, chunks, strict=True)}
    return ForkedRows(planner, draft, image, planned, entry, digests)


def _in_pages(slot: TensorRange) -> TensorRange:
    """Return the same place with pages as rows: a fork copies changed memory by page."""
    pages = -(-(slot.end - slot.start) // MOST_LEAF_BYTES)
    return msgspec.structs.replace(slot, shape=(pages, *slot.shape))
