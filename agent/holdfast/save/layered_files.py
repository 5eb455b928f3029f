"""Writes the layered files of a checkpoint: a base file, or links to one and a file with the rows that changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from holdfast.format import manifest as fmt
from holdfast.format.encoding import Encoding
from holdfast.incremental.layered_file import BASE_SUFFIX, base_encoding, masked_header
from holdfast.incremental.planner import IncrementalPlanner, LayeredWrite, layers_of
from holdfast.save.draft import Draft
from holdfast.save.reuse import stem_of
from holdfast.store import CheckpointWriter


class FileWriting(Protocol):
    """What writes the files of a checkpoint."""

    def link(self, writer: CheckpointWriter, file: fmt.File, source: str) -> bool:
        """Link a file of the checkpoint `source` and its parity file; False if that fails."""

    def write_file(
        self,
        writer: CheckpointWriter,
        name: str,
        header: bytes,
        slots: Sequence[fmt.TensorRange],
        payload: Sequence[memoryview | bytes],
        encoding: Encoding | None = None,
    ) -> tuple[fmt.File, float]:
        """Write a file and its parity file; return its entry, and the seconds without parity."""

    def entries(self, slots: Sequence[fmt.TensorRange], name: str, header_bytes: int) -> dict[str, fmt.Tensor]:
        """Return the manifest entries of tensors that are in the file `name`, behind its header."""


class LayeredFiles:
    """The layered files of one rank's part of a checkpoint."""

    def __init__(
        self, planner: IncrementalPlanner, draft: Draft, payload: memoryview, planned: LayeredWrite
    ) -> None:
        self._planner, self._draft, self._payload, self._planned = planner, draft, payload, planned
        self.names = frozenset(planned.slots)
        """The tensors that are in these files."""
        self.linked_bytes = planned.linked_bytes
        """Bytes of the tensors that need not be written."""

    def write(
        self, files: FileWriting, writer: CheckpointWriter
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
            entries = files.entries(moved, base.name, base.header_bytes)
            if parts := planned.region_parts(self._payload, entries):
                region, seconds = self._write_region(files, writer, parts)
                regions.append(region)
        assert base.encoding is not None
        encoding = msgspec.structs.replace(base.encoding, layers=layers_of(regions))
        base = msgspec.structs.replace(base, encoding=encoding)
        self._planner.written(draft.id, draft.lineage, planned, base, region)
        return [base, *regions], files.entries(moved, base.name, base.header_bytes), seconds

    def _write_base(
        self,
        files: FileWriting,
        writer: CheckpointWriter,
        slots: Sequence[fmt.TensorRange],
        moved: Sequence[fmt.TensorRange],
    ) -> tuple[fmt.File, float]:
        draft = self._draft
        name, header = f"{stem_of(draft.rank, draft.id)}{BASE_SUFFIX}", draft.header(moved)
        tensors = files.entries(moved, name, len(header))
        masked = masked_header(header)
        encoding = base_encoding(masked, [tensors[slot.name] for slot in moved])
        pieces = [self._payload[slot.start : slot.end] for slot in slots]
        return files.write_file(writer, name, header, moved, [masked, *pieces], encoding)

    def _write_region(
        self, files: FileWriting, writer: CheckpointWriter, parts: Sequence[memoryview | bytes]
    ) -> tuple[fmt.File, float]:
        name = f"{stem_of(self._draft.rank, self._draft.id)}{fmt.REGION_SUFFIX}"
        file, seconds = files.write_file(writer, name, b"", [], parts)
        whole = fmt.hasher()  # all of it counts as the header
        for part in parts:
            whole.update(part)
        header = {"header_bytes": file.size_bytes, "header_digest": whole.hexdigest()}
        return msgspec.structs.replace(file, **header), seconds


def plan_layers(planner: IncrementalPlanner, draft: Draft, payload: memoryview) -> LayeredFiles | None:
    """Return the layered files of a checkpoint; None if all of it is written as usual."""
    planner.settle(draft.id, is_durable=False)  # drop the plan of an earlier try
    code = draft.parity
    if code is not None and code.is_important:  # what it cannot repair is replaced, which no layer allows
        return None
    planned = planner.plan(draft.lineage, draft.slots, payload, draft.unchanged, may_link=draft.may_link)
    if planned is None:
        return None
    if code is not None and any(file.parity is None or file.parity.code != code for file in planned.linked_files):
        planned = planned.in_full()
    return LayeredFiles(planner, draft, payload, planned)
