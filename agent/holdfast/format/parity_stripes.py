"""Parity files: their layout, and how they are computed from the bytes of a payload file.

A file is cut into blocks of 4096 bytes, and its blocks into `data_blocks` rows of equal length, in file order: row
0 is the beginning of the file. The blocks at the same place of all rows are a stripe. For each stripe the parity
file has `parity_blocks` blocks. Damage to adjacent blocks therefore affects different stripes.

    table of digests     8 bytes (xxh3-64) for each block of the file, then for each parity block, row by row;
                         padded by zeros to a whole block
    parity rows          one after the other, each as long as a row of data
    table of digests     again, not padded

An entry of either copy of the table is enough. The digests locate damage; the digests in the manifest verify what
was recomputed.

With `important` parity, the blocks are not those of the file but of the stream of its important bytes, see
`important.py`. Before the first table, padded to a whole block, and after the last one, the file then has a guide:
the ranges of the important bytes, and the digest of each block of the payload file.

Does not import torch, and numpy only where parity is computed.
"""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Iterator, Sequence
from functools import partial

import msgspec
import xxhash

from holdfast.format.important import Cut, FileContents, important_ranges
from holdfast.format.parity_file import (
    ENTRY_BYTES,
    PARITY_BLOCK_BYTES,
    ImportantStream,
    ParityCode,
    ParityFile,
    blocks_of,
    padded,
    parity_name,
)

SEGMENT_BLOCKS = 256
"""Blocks of each row that are encoded at once: enough that Python code takes little of the time."""
SEGMENT_BYTES = SEGMENT_BLOCKS * PARITY_BLOCK_BYTES
MOST_IMPORTANT_SHARE = 0.5
"""Share of the bytes of a state that are important where its numbers have 16 bits, the narrowest."""


def parity_bytes(code: ParityCode, payload_bytes: int, important_bytes: int | None = None) -> int:
    """Return about how large the parity of a payload is.

    Args:
        important_bytes: what important parity protects of it; by default the most that numbers of 16 bits have.
    """
    if not code.is_important:
        return StripeLayout(code, payload_bytes).end
    kept = round(MOST_IMPORTANT_SHARE * payload_bytes) if important_bytes is None else important_bytes
    guide_bytes = blocks_of(payload_bytes) * ENTRY_BYTES
    return StripeLayout(code, kept, padded(guide_bytes)).end + guide_bytes


class StripeLayout:
    """Where the blocks of a payload file, or of its important bytes, and those of its parity file lie."""

    def __init__(self, code: ParityCode, payload_bytes: int, start: int = 0) -> None:
        self.code, self.payload_bytes = code, payload_bytes
        self.start = start
        """Offset of the first copy of the table in the parity file."""
        self.blocks = blocks_of(payload_bytes)
        """Blocks of the payload; the last may be shorter."""
        self.stripes = -(-self.blocks // code.data_blocks)
        self.row_bytes = self.stripes * PARITY_BLOCK_BYTES
        self.table_bytes = (self.blocks + code.parity_blocks * self.stripes) * ENTRY_BYTES
        self.parity_start = start + padded(self.table_bytes)
        self.copy_start = self.parity_start + code.parity_blocks * self.row_bytes
        """Offset of the second copy of the table."""
        self.end = self.copy_start + self.table_bytes
        """Offset behind that copy: the end of the file, or the second copy of the guide."""

    def data_range(self, row: int, stripe: int, count: int = 1) -> tuple[int, int]:
        """Return start and end, in the payload, of `count` adjacent blocks of a row; empty behind its end."""
        start = row * self.row_bytes + stripe * PARITY_BLOCK_BYTES
        end = start + count * PARITY_BLOCK_BYTES
        return min(start, self.payload_bytes), min(end, self.payload_bytes)

    def parity_range(self, row: int, stripe: int, count: int = 1) -> tuple[int, int]:
        """Return start and end, in the parity file, of `count` adjacent blocks of a parity row."""
        start = self.parity_start + row * self.row_bytes + stripe * PARITY_BLOCK_BYTES
        return start, start + count * PARITY_BLOCK_BYTES

    def stream_digest(self, found: memoryview) -> str:
        """Return the digest of the digests of the blocks of the payload, in a parity file."""
        return xxhash.xxh3_128_hexdigest(found[self.start : self.start + self.blocks * ENTRY_BYTES])

    def parity_entry(self, row: int, stripe: int) -> int:
        """Return the place in the table of the digest of a parity block."""
        return self.blocks + row * self.stripes + stripe


def block_digests(data: memoryview) -> Iterator[bytes]:
    """Yield the digest of each block of `data`."""
    digest = xxhash.xxh3_64_digest
    return (digest(data[at : at + PARITY_BLOCK_BYTES]) for at in range(0, len(data), PARITY_BLOCK_BYTES))


def build_parity(
    code: ParityCode,
    payload: str,
    parts: Sequence[memoryview | bytes],
    contents: FileContents | None = None,
) -> tuple[memoryview, ParityFile]:
    """Compute the parity file of a payload file.

    Takes memory of the size of the parity file, which is page-aligned.

    Args:
        contents: what it consists of, for a code that protects only important bytes.

    Returns:
        The bytes of the parity file, and its entry in the manifest.
    """
    views = [memoryview(part).cast("B") for part in parts]
    payload_bytes = sum(map(len, views))
    cut: Cut = partial(_cut, views)
    ranges, guide, layout = None, b"", StripeLayout(code, payload_bytes)
    if code.is_important:
        assert contents is not None
        ranges = important_ranges(cut, contents)
        guide = ranges.encode() + _digests_ofblocks_of(cut, payload_bytes)
        layout = StripeLayout(code, ranges.size_bytes, padded(len(guide)))
        cut = partial(ranges.gather, cut)
    memory = memoryview(
        mmap.mmap(-1, max(1, layout.end + len(guide)), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    )
    found = memory[: layout.end + len(guide)]
    found[: len(guide)] = found[layout.end :] = guide
    _fill_stripes(layout, cut, found)
    important: ImportantStream | msgspec.UnsetType = msgspec.UNSET
    if ranges is not None:
        important = ImportantStream(
            size_bytes=ranges.size_bytes,
            digest=layout.stream_digest(found),
            ranges=len(ranges.ranges),
            ranges_digest=xxhash.xxh3_128_hexdigest(ranges.encode()),
        )
    return found, ParityFile(
        name=parity_name(payload),
        size_bytes=len(found),
        digest=xxhash.xxh3_128_hexdigest(found),
        data_blocks=code.data_blocks,
        parity_blocks=code.parity_blocks,
        important=important,
    )


def _fill_stripes(layout: StripeLayout, cut: Cut, found: memoryview) -> None:
    """Compute the parity rows and both tables in their places in the parity file."""
    from holdfast.codecs import parity

    code, table = layout.code, found[layout.start : layout.start + layout.table_bytes]

    def enter(number: int, data: memoryview) -> None:
        digests = b"".join(block_digests(data))
        table[number * ENTRY_BYTES : number * ENTRY_BYTES + len(digests)] = digests

    for stripe in range(0, layout.stripes, SEGMENT_BLOCKS):
        count = min(SEGMENT_BLOCKS, layout.stripes - stripe)
        size_bytes = count * PARITY_BLOCK_BYTES
        rows = [memoryview(cut(*layout.data_range(row, stripe, count))) for row in range(code.data_blocks)]
        for row, data in enumerate(rows):
            enter(row * layout.stripes + stripe, data)
        for row, data in enumerate(parity.encode(rows, code.parity_blocks, size_bytes)):
            start, end = layout.parity_range(row, stripe, count)
            found[start:end] = data
            enter(layout.parity_entry(row, stripe), data)
    found[layout.copy_start : layout.end] = table


def _digests_ofblocks_of(cut: Cut, size_bytes: int) -> bytes:
    starts = range(0, size_bytes, SEGMENT_BYTES)
    pieces = (memoryview(cut(start, min(start + SEGMENT_BYTES, size_bytes))) for start in starts)
    return b"".join(digest for piece in pieces for digest in block_digests(piece))


def _cut(views: Sequence[memoryview], start: int, end: int) -> memoryview:
    """Return a range of the concatenation of `views`, without a copy if it is within one of them."""
    ends = itertools.accumulate(map(len, views))
    pieces = [
        view[max(0, start - (upto - len(view))) : max(0, end - (upto - len(view)))]
        for view, upto in zip(views, ends, strict=True)
    ]
    filled = [piece for piece in pieces if len(piece)]
    if len(filled) == 1:
        return filled[0]
    return memoryview(b"".join(filled))
