"""Copies of the manifest in a checkpoint with parity. Does not import torch."""

from __future__ import annotations

from holdfast.format import manifest as fmt
from holdfast.store import CheckpointWriter


def write_manifest_copies(writer: CheckpointWriter, manifest: fmt.Manifest, data: bytes) -> None:
    """Write the copies of the manifest `data`, where the checkpoint has parity. Before the commit.

    Raises what `CheckpointWriter.write` does.
    """
    for name in manifest_copies(manifest):
        writer.write(name, [data])


def manifest_copies(manifest: fmt.Manifest) -> tuple[str, ...]:
    """Return the names of the copies of a manifest."""
    return fmt.MANIFEST_COPIES if any(file.parity for file in manifest.files) else ()
