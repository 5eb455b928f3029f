"""Locate damaged blocks by their digests, and recompute them from a parity file. Does not import torch."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Protocol

from holdfast.errors import DamagedCheckpoint
from holdfast.format.parity_file import ENTRY_BYTES, PARITY_BLOCK_BYTES
from holdfast.format.parity_stripes import StripeLayout, block_digests
from holdfast.store import Store
from holdfast.store.base import FileReader, Pace
from holdfast.system.host_memory import fresh_memory

SCAN_BLOCKS = 2048
"""Blocks that are read at once to locate damage."""


class BlockReader(FileReader):
    """Reads a file that may be damaged, short or missing; what cannot be read is zeros."""

    def __init__(self, store: Store, job: str, checkpoint: str, file: str, pace: Pace | None = None) -> None:
        self._pace = pace
        try:
            self._reader: FileReader | None = store.open_file(job, checkpoint, file, from_disk=True)
        except DamagedCheckpoint:
            self._reader = None
        self.size_bytes = 0 if self._reader is None else self._reader.size_bytes
        """Size of the file as it is now; 0 if it is missing."""

    def read_into(self, start: int, target: memoryview) -> None:
        if self._pace is not None:
            self._pace(len(target))
        end = min(len(target), max(0, self.size_bytes - start))
        target[end:] = bytes(len(target) - end)
        if self._reader is None or not end:
            return
        try:
            self._reader.read_into(start, target[:end])
        except DamagedCheckpoint:  # one block may be unreadable, and the others not
            for at in range(0, end, PARITY_BLOCK_BYTES):
                block = target[at : min(at + PARITY_BLOCK_BYTES, end)]
                try:
                    self._reader.read_into(start + at, block)
                except DamagedCheckpoint:
                    block[:] = bytes(len(block))

    def read(self, start: int, end: int) -> memoryview:
        found = memoryview(fresh_memory(end - start))[: end - start]
        self.read_into(start, found)
        return found

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()


class BlockSource(Protocol):
    """Protected bytes: a file, or the stream of its important bytes."""

    def read(self, start: int, end: int) -> memoryview: ...


class DigestTables:
    """Both copies of a table of digests."""

    def __init__(self, parity: BlockReader, start: int, copy_start: int, size_bytes: int) -> None:
        ends = [(at, min(at + size_bytes, parity.size_bytes)) for at in (start, copy_start)]
        self._copies = [parity.read(at, end) for at, end in ends if at < end]

    def match(self, entry: int, digest: bytes) -> bool:
        at = entry * ENTRY_BYTES
        return any(copy[at : at + ENTRY_BYTES] == digest for copy in self._copies)


def find_damaged(size_bytes: int, data: BlockSource, tables: DigestTables) -> tuple[list[int], list[bytes]]:
    """Return the numbers of damaged blocks, and the digest of each block as it is."""
    damaged, digests = list[int](), list[bytes]()
    for start in range(0, size_bytes, SCAN_BLOCKS * PARITY_BLOCK_BYTES):
        read = data.read(start, min(start + SCAN_BLOCKS * PARITY_BLOCK_BYTES, size_bytes))
        for digest in block_digests(read):
            if not tables.match(len(digests), digest):
                damaged.append(len(digests))
            digests.append(digest)
    return damaged, digests


def recover_blocks(
    layout: StripeLayout, data: BlockSource, parity: BlockReader, tables: DigestTables, damaged: Sequence[int]
) -> tuple[dict[int, memoryview], list[int]]:
    """Return recomputed blocks by number, and the numbers of blocks that the parity cannot recompute."""
    blocks, beyond = dict[int, memoryview](), list[int]()
    for stripe, count, rows in _runs(layout, damaged):
        found = _recovered(layout, data, parity, tables, stripe, count, rows)
        lost = [row * layout.stripes + stripe + n for row in rows for n in range(count)]
        beyond += [block for block in lost if block not in found]
        blocks |= found
    return blocks, sorted(beyond)


def _runs(layout: StripeLayout, damaged: Sequence[int]) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Yield (first stripe, number of stripes, damaged rows) of adjacent stripes with damage in the same rows."""
    rows: dict[int, list[int]] = {}
    for block in damaged:
        rows.setdefault(block % layout.stripes, []).append(block // layout.stripes)
    stripes = sorted(rows)
    numbered = enumerate(stripes)
    for (_, lost), group in itertools.groupby(
        numbered, key=lambda pair: (pair[1] - pair[0], tuple(rows[pair[1]]))
    ):
        run = [stripe for _, stripe in group]
        for at in range(0, len(run), SCAN_BLOCKS):
            yield run[at], len(run[at : at + SCAN_BLOCKS]), lost


def _recovered(
    layout: StripeLayout,
    data: BlockSource,
    parity: BlockReader,
    tables: DigestTables,
    stripe: int,
    count: int,
    rows: Sequence[int],
) -> dict[int, memoryview]:
    """Return the damaged blocks of adjacent stripes that can be recomputed."""
    from holdfast.codecs import parity as code

    parities = [parity.read(*layout.parity_range(row, stripe, count)) for row in range(layout.code.parity_blocks)]
    firsts = [layout.parity_entry(row, stripe) for row in range(layout.code.parity_blocks)]
    sound = [
        [tables.match(first + n, each) for n, each in enumerate(block_digests(read))]
        for first, read in zip(firsts, parities, strict=True)
    ]
    left = [
        None if row in rows else data.read(*layout.data_range(row, stripe, count))
        for row in range(layout.code.data_blocks)
    ]
    found: dict[int, memoryview] = {}
    # parity blocks may be damaged as well: adjacent stripes with the same ones sound are recomputed at once
    patterns = list(zip(*sound, strict=True))
    for pattern, group in itertools.groupby(range(count), key=lambda n: patterns[n]):
        members = list(group)
        start, end = members[0] * PARITY_BLOCK_BYTES, (members[-1] + 1) * PARITY_BLOCK_BYTES
        cut = [None if row is None else row[start:end] for row in left]
        ours = [read[start:end] if usable else None for read, usable in zip(parities, pattern, strict=True)]
        with contextlib.suppress(code.TooManyLost):
            for row, recovered in code.recover(cut, ours, end - start).items():
                for n in members:
                    number = row * layout.stripes + stripe + n
                    length = min(PARITY_BLOCK_BYTES, layout.payload_bytes - number * PARITY_BLOCK_BYTES)
                    at = (n - members[0]) * PARITY_BLOCK_BYTES
                    found[number] = recovered[at : at + length]
    return found
