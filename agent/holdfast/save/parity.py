"""Writes the parity file of a payload file. Does not import torch."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from holdfast.format import manifest as fmt
from holdfast.format.important import FileContents, PlacedTensor
from holdfast.format.parity_file import ParityCode
from holdfast.format.parity_stripes import build_parity
from holdfast.store import CheckpointWriter
from holdfast.store.base import Pace


def with_parity(
    writer: CheckpointWriter,
    code: ParityCode,
    file: fmt.File,
    parts: Sequence[memoryview | bytes],
    slots: Sequence[fmt.TensorRange],
    pace: Pace | None = None,
) -> fmt.File:
    """Compute and write the parity file of a file whose bytes are `parts`; return its entry with that.

    Args:
        slots: its tensors, at their positions behind the header.
        pace: waits before bytes are written, to keep a rate.

    Raises what `CheckpointWriter.write` does.
    """
    opening = file.header_bytes
    tensors = (PlacedTensor(opening + each.start, opening + each.end, each.dtype) for each in slots)
    found, entry = build_parity(code, file.name, parts, FileContents(opening, tensors, file.encoding))
    writer.write(entry.name, [found], pace=pace)
    return msgspec.structs.replace(file, parity=entry)
