"""Encoded payload files: a plain file is cut into blocks, which are stored one after the other.

A block holds numbers of one width, and is stored as byte planes, or as it is where that saves too little. All
positions of tensors stay those of the plain file. Does not import torch, and numpy only where blocks are encoded.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence

import msgspec
import xxhash

from holdfast.errors import UnknownFormat

CODEC = "byte-planes"
LAYERED = "layers"
"""A base file, over which region files are laid."""
MOST_BLOCK_BYTES = 16 << 20
OWN_BLOCK_BYTES = 1 << 20
"""A tensor of at least this size shares no block with others: what is gained is decided for each block."""
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
            UnknownFormat: a newer Holdfast encoded it.
        """
        if self.codec not in (CODEC, LAYERED):
            raise UnknownFormat(f"{file} has the unknown encoding {self.codec!r}: upgrade holdfast to restore it")
        for number, block in enumerate(self.blocks):
            is_sound = 0 < block.stored_bytes <= block.raw_bytes <= MOST_BLOCK_BYTES
            is_sound &= self.codec == CODEC or block.stored_bytes == block.raw_bytes
            if not is_sound or not _DIGEST.fullmatch(block.digest):
                return f"{file} has an invalid encoded block {number}"
        if self.stored_starts[-1] != stored_bytes or self.raw_starts[-1] != self.raw_bytes:
            return f"the encoded blocks of {file} do not make up its {stored_bytes} bytes"
        if (self.layers is msgspec.UNSET) == (self.codec == LAYERED):
            return f"{file} has layers, or lacks them"
        return None


def cut_blocks(tensors: Iterable[tuple[int, int, int]]) -> Iterator[tuple[int, int, int]]:
    """Yield the (start, end, width of a number) of blocks, from those of tensors, in their order."""
    pending: tuple[int, int, int] | None = None
    for start, end, width in tensors:
        if start == end:
            continue
        is_small = end - start < OWN_BLOCK_BYTES
        if pending is not None:
            first, last, known = pending
            if is_small and (last, known) == (start, width) and end - first <= MOST_BLOCK_BYTES:
                pending = first, end, width
                continue
            yield pending
        pending = (start, end, width) if is_small else None
        if not is_small:
            yield from ((at, min(at + MOST_BLOCK_BYTES, end), width) for at in range(start, end, MOST_BLOCK_BYTES))
    if pending is not None:
        yield pending


def encode_parts(
    header: bytes, payload: memoryview, blocks: Iterable[tuple[int, int, int]]
) -> tuple[list[memoryview | bytes], Encoding | None]:
    """Encode a file that consists of `header` and `blocks` of the payload.

    Takes memory of the size of the result. The first block is always encoded: its first bytes, as the length of a
    header, are beyond the limit of safetensors, which therefore refuses the file.

    Returns:
        The bytes to store, and their description; None where no block of the payload became smaller.
    """
    from holdfast.codecs import planes

    parts: list[memoryview | bytes] = [planes.encode(piece, 1) or piece for piece in _pieces(header)]
    raw, is_smaller = [len(piece) for piece in _pieces(header)], False
    for start, end, width in blocks:
        data = payload[start:end]
        encoded = planes.encode(data, width)
        is_smaller |= encoded is not None
        parts.append(data if encoded is None else encoded)
        raw.append(len(data))
    if not is_smaller or len(parts[0]) == raw[0]:
        return [], None
    found = [
        EncodedBlock(size, len(part), xxhash.xxh3_128_hexdigest(part))
        for size, part in zip(raw, parts, strict=True)
    ]
    return parts, Encoding(raw_bytes=sum(raw), blocks=found)


def decode_block(block: EncodedBlock, stored: memoryview, out: memoryview) -> str | None:
    """Decode a block into `out`, which has its raw size; return what is wrong with it, or None."""
    if xxhash.xxh3_128_hexdigest(stored) != block.digest:
        return "does not match its digest"
    if block.stored_bytes == block.raw_bytes:
        out[:] = stored
        return None
    from holdfast.codecs import planes

    try:
        planes.decode(stored, out)
    except planes.DamagedEncoding as error:
        return f"cannot be decoded: {error}"
    return None


def _pieces(data: bytes) -> Sequence[bytes]:
    return [data[at : at + MOST_BLOCK_BYTES] for at in range(0, len(data), MOST_BLOCK_BYTES)]
