"""Parity files: their layout, and how they are computed from the bytes of a payload file.

A file is cut into blocks of 4096 bytes, and its blocks into `data_blocks` rows of equal length, in file order: row
0 is the beginning of the file. The blocks at the same place of all rows are a stripe. For each stripe the parity
file has `parity_blocks` blocks. Damage to adjacent blocks therefore affects different stripes.

    table of digests     8 bytes (xxh3-64) for each block of the file, then for each parity block, row by row;
                         padded by zeros to a whole block
    parity rows          one after the other, each as long as a row of data
    table of digests     again, not padded

An entry of either copy of the table is enough. The digests locate damage; the digests in the manifest verify what
was recomputed. Does not import torch, and numpy only where parity is computed.
"""

from __future__ import annotations

import itertools
import mmap
import re
from collections.abc import Iterator, Sequence
from importlib.util import find_spec

import msgspec
import xxhash

PARITY_BLOCK_BYTES = 4096
ENTRY_BYTES = 8
SEGMENT_BLOCKS = 256
"""Blocks of each row that are encoded at once: enough that Python code takes little of the time."""
MOST_DATA_BLOCKS = 128
MOST_PARITY_BLOCKS = 3
_CODE = re.compile(r"\s*([0-9]{1,3})\s*\+\s*([0-9]{1,3})\s*")


class ParityCode(msgspec.Struct, frozen=True):
    """How many blocks of a stripe hold data, and how many hold parity: as many may be lost."""

    data_blocks: int
    parity_blocks: int

    def __str__(self) -> str:
        return f"{self.data_blocks}+{self.parity_blocks}"

    @property
    def is_valid(self) -> bool:
        return 1 <= self.data_blocks <= MOST_DATA_BLOCKS and 1 <= self.parity_blocks <= MOST_PARITY_BLOCKS


def parse_parity(value: ParityCode | str) -> ParityCode | None:
    """Parse `10+2`; None for `off`. ValueError names the setting and what it may be."""
    if isinstance(value, ParityCode):
        return value
    if str(value).strip().lower() == "off":
        return None
    found = _CODE.fullmatch(str(value))
    code = ParityCode(int(found[1]), int(found[2])) if found else None
    if code is None or not code.is_valid:
        raise ValueError(
            f"parity={value!r}: give off, or data and parity blocks as in 10+2, with at most {MOST_DATA_BLOCKS} "
            f"data and {MOST_PARITY_BLOCKS} parity blocks"
        )
    if find_spec("numpy") is None:
        raise ValueError(f"parity={value!r}: parity needs numpy: pip install numpy, or give off")
    return code


class ParityFile(msgspec.Struct, frozen=True, kw_only=True):
    """The parity file of a payload file."""

    name: str
    size_bytes: int
    digest: str
    data_blocks: int
    parity_blocks: int
    block_bytes: int = PARITY_BLOCK_BYTES

    @property
    def code(self) -> ParityCode:
        return ParityCode(self.data_blocks, self.parity_blocks)

    def fault(self, payload: str, payload_bytes: int) -> str | None:
        """Return why this cannot be the parity file of a payload file; None if it can."""
        if self.name != parity_name(payload):
            return f"{self.name!r} is not the name of the parity file of {payload}"
        if not self.code.is_valid or self.block_bytes != PARITY_BLOCK_BYTES:
            return f"{self.name} has the unknown parity {self.code} of blocks of {self.block_bytes} bytes"
        if self.size_bytes != StripeLayout(self.code, payload_bytes).size_bytes:
            return f"{self.name} has an invalid size of {self.size_bytes} bytes"
        return None


def parity_name(payload: str) -> str:
    """Return the name of the parity file of a payload file."""
    return f"{payload.removesuffix('.safetensors')}.parity"


class StripeLayout:
    """Where the blocks of a payload file and of its parity file lie."""

    def __init__(self, code: ParityCode, payload_bytes: int) -> None:
        self.code, self.payload_bytes = code, payload_bytes
        self.blocks = -(-payload_bytes // PARITY_BLOCK_BYTES)
        """Blocks of the payload file; the last may be shorter."""
        self.stripes = -(-self.blocks // code.data_blocks)
        self.row_bytes = self.stripes * PARITY_BLOCK_BYTES
        self.table_bytes = (self.blocks + code.parity_blocks * self.stripes) * ENTRY_BYTES
        self.parity_start = -(-self.table_bytes // PARITY_BLOCK_BYTES) * PARITY_BLOCK_BYTES
        self.copy_start = self.parity_start + code.parity_blocks * self.row_bytes
        """Offset of the second copy of the table."""
        self.size_bytes = self.copy_start + self.table_bytes

    def data_range(self, row: int, stripe: int, count: int = 1) -> tuple[int, int]:
        """Return start and end, in the payload file, of `count` adjacent blocks of a row; empty behind its end."""
        start = row * self.row_bytes + stripe * PARITY_BLOCK_BYTES
        end = start + count * PARITY_BLOCK_BYTES
        return min(start, self.payload_bytes), min(end, self.payload_bytes)

    def parity_range(self, row: int, stripe: int, count: int = 1) -> tuple[int, int]:
        """Return start and end, in the parity file, of `count` adjacent blocks of a parity row."""
        start = self.parity_start + row * self.row_bytes + stripe * PARITY_BLOCK_BYTES
        return start, start + count * PARITY_BLOCK_BYTES

    def parity_entry(self, row: int, stripe: int) -> int:
        """Return the place in the table of the digest of a parity block."""
        return self.blocks + row * self.stripes + stripe


def block_digests(data: memoryview) -> Iterator[bytes]:
    """Yield the digest of each block of `data`."""
    digest = xxhash.xxh3_64_digest
    return (digest(data[at : at + PARITY_BLOCK_BYTES]) for at in range(0, len(data), PARITY_BLOCK_BYTES))


def build_parity(
    code: ParityCode, payload: str, parts: Sequence[memoryview | bytes]
) -> tuple[memoryview, ParityFile]:
    """Compute the parity file of a payload file.

    Takes memory of the size of the parity file, which is page-aligned.

    Returns:
        The bytes of the parity file, and its entry in the manifest.
    """
    from holdfast.codecs import parity

    views = [memoryview(part).cast("B") for part in parts]
    layout = StripeLayout(code, sum(map(len, views)))
    memory = memoryview(mmap.mmap(-1, max(1, layout.size_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    found = memory[: layout.size_bytes]

    def enter(number: int, data: memoryview) -> None:
        digests = b"".join(block_digests(data))
        found[number * ENTRY_BYTES : number * ENTRY_BYTES + len(digests)] = digests

    for stripe in range(0, layout.stripes, SEGMENT_BLOCKS):
        count = min(SEGMENT_BLOCKS, layout.stripes - stripe)
        size_bytes = count * PARITY_BLOCK_BYTES
        rows = [_cut(views, *layout.data_range(row, stripe, count)) for row in range(code.data_blocks)]
        for row, data in enumerate(rows):
            enter(row * layout.stripes + stripe, data)
        for row, data in enumerate(parity.encode(rows, code.parity_blocks, size_bytes)):
            start, end = layout.parity_range(row, stripe, count)
            found[start:end] = data
            enter(layout.parity_entry(row, stripe), data)
    found[layout.copy_start :] = found[: layout.table_bytes]
    return found, ParityFile(
        name=parity_name(payload),
        size_bytes=layout.size_bytes,
        digest=xxhash.xxh3_128_hexdigest(found),
        data_blocks=code.data_blocks,
        parity_blocks=code.parity_blocks,
    )


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
