"""Writes the layered files of a checkpoint: a base file, or links to one and a file with the rows that changed."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from holdfast.format import manifest as fmt
from holdfast.incremental.layered_file import BASE_SUFFIX, base_encoding, masked_header
from holdfast.incremental.planner import IncrementalPlanner, LayeredWrite, layers_of, rows_in
from holdfast.save.draft import Draft
from holdfast.save.reuse import stem_of
from holdfast.store import CheckpointWriter

if TYPE_CHECKING:
    import torch

    from holdfast.save.writer import CheckpointFiles

logger = logging.getLogger("holdfast")


class LayeredFiles:
    """The layered files of one rank's part of a checkpoint."""

    def __init__(
        self, planner: IncrementalPlanner, draft: Draft, payload: memoryview, planned: LayeredWrite
    ) -> None:
        self._planner, self._draft, self._payload, self._planned = planner, draft, payload, planned
        self._stem = stem_of(draft.rank, draft.id)
        self.names = frozenset(planned.slots)
        """The tensors that are in these files."""
        self.linked_bytes = planned.linked_bytes
        """Bytes of the tensors that need not be written."""

    def write(
        self, files: CheckpointFiles, writer: CheckpointWriter
    ) -> tuple[list[fmt.File], dict[str, fmt.Tensor], float]:
        """Write or link the files; return them, the entries of their tensors, and the seconds of writing."""
        planned, draft = self._planned, self._draft
        slots = [slot for slot in draft.slots if slot.name in self.names]
        moved, at = list[fmt.TensorRange](), 0
        for slot in slots:
            end = at + slot.end - slot.start
            moved.append(msgspec.structs.replace(slot, start=at, end=end))
            at = end
        region, seconds = None, 0.0
        if planned.before is not None:
            source = planned.before.checkpoint
            if not all(files.link(writer, file, source) for file in planned.linked_files):
                planned = planned.in_full()
        if planned.before is None:
            base, seconds = self._write_base(files, writer, slots, moved)
            regions = []
        else:
            base, *regions = planned.linked_files
            entries = self._entries(files, moved, base.name, base.header_bytes)
            if parts := planned.region_parts(self._rows, entries):
                region, seconds = self._write_region(files, writer, parts)
                regions.append(region)
        assert base.encoding is not None
        encoding = msgspec.structs.replace(base.encoding, layers=layers_of(regions))
        base = msgspec.structs.replace(base, encoding=encoding)
        self._planner.written(draft.id, draft.lineage, planned, base, region)
        return [base, *regions], self._entries(files, moved, base.name, base.header_bytes), seconds

    def _write_base(
        self,
        files: CheckpointFiles,
        writer: CheckpointWriter,
        slots: Sequence[fmt.TensorRange],
        moved: Sequence[fmt.TensorRange],
    ) -> tuple[fmt.File, float]:
        name, header = f"{self._stem}{BASE_SUFFIX}", self._draft.header(moved)
        tensors = self._entries(files, moved, name, len(header))
        masked = masked_header(header)
        encoding = base_encoding(masked, [tensors[slot.name] for slot in moved])
        pieces = [self._payload[slot.start : slot.end] for slot in slots]
        return files.write_file(writer, name, header, moved, [masked, *pieces], encoding)

    def _write_region(
        self, files: CheckpointFiles, writer: CheckpointWriter, parts: Sequence[memoryview | bytes]
    ) -> tuple[fmt.File, float]:
        name = f"{self._stem}{fmt.REGION_SUFFIX}"
        file, seconds = files.write_file(writer, name, b"", [], parts)
        whole = fmt.hasher()  # all of it counts as the header
        for part in parts:
            whole.update(part)
        header = {"header_bytes": file.size_bytes, "header_digest": whole.hexdigest()}
        return msgspec.structs.replace(file, **header), seconds

    def _entries(
        self, files: CheckpointFiles, slots: Sequence[fmt.TensorRange], name: str, header_bytes: int
    ) -> dict[str, fmt.Tensor]:
        return files.entries(slots, name, header_bytes)

    def _rows(self, slot: fmt.TensorRange, leaves: torch.Tensor) -> list[memoryview]:
        return rows_in(self._payload, slot, leaves)


@functools.cache
def warn_once() -> None:
    logger.warning("the rows that changed cannot be found, so tensors are written in full", exc_info=True)


def plan_layers(planner: IncrementalPlanner, draft: Draft, payload: memoryview) -> LayeredFiles | None:
    """Return the layered files of a checkpoint; None if all of it is written as usual."""
    planner.settle(draft.id, is_durable=False)  # drop the plan of an earlier try
    code = draft.parity
    if code is not None and code.is_important:  # what it cannot repair is replaced, which no layer allows
        return None
    try:
        planned = planner.plan(draft.lineage, draft.slots, payload, draft.unchanged, may_link=draft.may_link)
    except (MemoryError, RuntimeError):  # also of torch: a plan only saves space
        warn_once()
        return None
    if planned is None:
        return None
    if code is not None and any(file.parity is None or file.parity.code != code for file in planned.linked_files):
        planned = planned.in_full()
    return LayeredFiles(planner, draft, payload, planned)
