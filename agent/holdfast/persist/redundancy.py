"""Write what a damaged checkpoint is repaired from: parity files, and copies of the manifest."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.format import manifest as fmt
from holdfast.format.parity_file import ParityCode, ParityFile, build_parity
from holdfast.store import CheckpointWriter
from holdfast.store.base import Pace


def write_parity(
    writer: CheckpointWriter,
    code: ParityCode | None,
    payload: str,
    parts: Sequence[memoryview | bytes],
    pace: Pace | None,
) -> ParityFile | None:
    """Compute and write the parity file of a payload file, whose bytes are `parts`; None without a code.

    Raises what `CheckpointWriter.write` does.
    """
    if code is None:
        return None
    found, entry = build_parity(code, payload, parts, pace or (lambda size_bytes: None))
    writer.write(entry.name, [found], pace=pace)
    return entry


def write_manifest_copies(writer: CheckpointWriter, manifest: fmt.Manifest, data: bytes) -> None:
    """Write the copies of the manifest `data`, where the checkpoint has parity. Before the commit.

    Raises what `CheckpointWriter.write` does.
    """
    for name in manifest_copies(manifest):
        writer.write(name, [data])


def manifest_copies(manifest: fmt.Manifest) -> tuple[str, ...]:
    """Return the names of the copies of a manifest."""
    return fmt.MANIFEST_COPIES if any(file.parity for file in manifest.files) else ()
