"""Encoded payload files: a plain file is cut into blocks, which are stored one after the other.

A block holds numbers of one width, and is stored as a file transform encodes it, or as it is where that saves too
little. All positions of tensors stay those of the plain file. Does not import torch.
"""

from __future__ import annotations

import functools
import itertools
import re

import msgspec

CODEC = "byte-planes"
LAYERED = "layers"
"""A base file, over which region files are laid."""
MOST_BLOCK_BYTES = 16 << 20
_DIGEST = re.compile(r"[0-9a-f]{32}")


class EncodedBlock(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A range of the plain file; it is stored as it is where both sizes are equal."""

    raw_bytes: int
    stored_bytes: int
    digest: str
    """Digest of the stored bytes. The digests of tensors verify what is decoded."""


class StoredLayer(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A region file, which is also one of the files of the checkpoint."""

    name: str
    size_bytes: int
    digest: str


class Encoding(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """How a payload file is stored."""

    codec: str = CODEC
    """Name of the file transform that encoded it."""
    raw_bytes: int
    """Size of the plain file."""
    blocks: list[EncodedBlock]
    """All blocks, in file order. Those of a base file are as they are, its header but for the first bytes."""
    layers: list[StoredLayer] | msgspec.UnsetType = msgspec.UNSET
    """The region files to lay over a base file, in this order; absent for others."""

    @functools.cached_property
    def raw_starts(self) -> list[int]:
        """Where each block starts in the plain file, and where the last one ends."""
        return [0, *itertools.accumulate(block.raw_bytes for block in self.blocks)]

    @functools.cached_property
    def stored_starts(self) -> list[int]:
        """Where each block starts in the stored file, and where the last one ends."""
        return [0, *itertools.accumulate(block.stored_bytes for block in self.blocks)]

    def fault(self, file: str, stored_bytes: int) -> str | None:
        """Return why this cannot describe a file of `stored_bytes`; None if it can.

        Raises:
            UnknownFormat: a newer Holdfast encoded it, or a package that is not installed.
        """
        if self.codec not in (CODEC, LAYERED):
            from holdfast.format.file_transforms import require_transform  # of another package

            require_transform(self.codec, file)
        for number, block in enumerate(self.blocks):
            is_sound = 0 < block.stored_bytes <= block.raw_bytes <= MOST_BLOCK_BYTES
            is_sound &= self.codec != LAYERED or block.stored_bytes == block.raw_bytes
            if not is_sound or not _DIGEST.fullmatch(block.digest):
                return f"{file} has an invalid encoded block {number}"
        if self.stored_starts[-1] != stored_bytes or self.raw_starts[-1] != self.raw_bytes:
            return f"the encoded blocks of {file} do not make up its {stored_bytes} bytes"
        if (self.layers is msgspec.UNSET) == (self.codec == LAYERED):
            return f"{file} has layers, or lacks them"
        return None
