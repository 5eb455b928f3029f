"""Recompute damaged blocks of a checkpoint's files from their parity files, in memory. Does not import torch."""

from __future__ import annotations

import contextlib
import itertools
import posixpath
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.checkpoint import reading
from holdfast.checkpoint.decoding import decoded
from holdfast.checkpoint.reading import FileRange, Progress
from holdfast.errors import DamagedCheckpoint
from holdfast.format import manifest as fmt
from holdfast.format.parity_file import (
    ENTRY_BYTES,
    PARITY_BLOCK_BYTES,
    ParityFile,
    StripeLayout,
    block_digests,
)
from holdfast.store import Store
from holdfast.store.base import FileReader, Pace
from holdfast.system.host_memory import fresh_memory

SCAN_BLOCKS = 2048
"""Blocks that are read at once to locate damage."""
MOST_RANGES = 8
"""Ranges that a description of damage lists."""


def read_repairing(
    store: Store,
    job: str,
    checkpoint: str,
    ranges: Sequence[FileRange],
    *,
    keep: bool = True,
    from_disk: bool = False,
    sink: Callable[[FileRange], None] | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> list[str]:
    """Read and verify `ranges` as `reading.read` does, and repair damaged files in memory where parity allows it.

    A second read follows only for the ranges that the first did not complete. With `from_disk`, bytes that are
    kept come from the storage device as well.

    Returns:
        A description of the damage to each file that was repaired in memory.
    """
    done: set[int] = set()
    repaired: dict[str, RepairedFile] = {}
    total_bytes = sum(each.end - each.start for each in ranges)

    def deliver(each: FileRange) -> None:
        if sink is not None:
            sink(each)
        done.add(id(each))

    def advance(now_bytes: int, left_bytes: int) -> None:
        if progress is not None:
            progress(total_bytes - left_bytes + now_bytes, total_bytes)

    def open_file(file: fmt.File) -> FileReader:
        if file.name in repaired:
            return decoded(file, repaired[file.name].open())
        return reading.open_whole(store, job, checkpoint, file, from_disk=from_disk or not keep)

    while True:
        left = [each for each in ranges if id(each) not in done]
        try:
            reading.read(
                *(store, job, checkpoint, left),
                open_file=open_file, keep=keep, sink=deliver, progress=advance, **options,
            )  # fmt: skip
        except DamagedCheckpoint as damage:
            file = _repairable(damage, left)
            if file is None:
                raise
            known = repaired.get(file.name)
            repaired[file.name] = _repair(store, job, checkpoint, file, damage, known, pace=options.get("pace"))
        else:
            return [f"{name}: {each.description}" for name, each in repaired.items()]


def _repair(
    store: Store,
    job: str,
    checkpoint: str,
    file: fmt.File,
    damage: DamagedCheckpoint,
    known: RepairedFile | None,
    *,
    pace: Pace | None,
) -> RepairedFile:
    """Repair a file after the first damage found in it; any in the repaired file, `known`, is final."""
    if known is not None:
        raise DamagedCheckpoint(file.name, f"{damage.reason}; {known.refusal or known.description}") from None
    try:
        return repair_in_memory(store, job, checkpoint, file, pace=pace)
    except DamagedCheckpoint as refused:
        raise DamagedCheckpoint(file.name, f"{damage.reason}; {refused.reason}") from None


def _repairable(damage: DamagedCheckpoint, ranges: Sequence[FileRange]) -> fmt.File | None:
    name = posixpath.basename(damage.file)
    return next((each.file for each in ranges if each.file.name == name and each.file.parity is not None), None)


@dataclass(frozen=True)
class RepairedFile:
    """A payload file with its damaged blocks recomputed."""

    file: fmt.File
    reopen: Callable[[], BlockReader]
    damaged: list[int]
    """Numbers of the damaged blocks."""
    blocks: dict[int, memoryview]
    """Recomputed blocks by number."""
    beyond: list[int]
    """Damaged blocks that the parity cannot recompute."""

    def open(self) -> FileReader:
        """Open the file as it was written. Its digests are still to be verified."""
        return _RepairedReader(self)

    @property
    def description(self) -> str:
        """The damaged ranges."""
        if not self.damaged:
            return "its size is wrong, or it could not be read at first"
        if self.matches_nothing:
            return "no block of it matches its parity file"
        return f"{_counted(self.damaged)} damaged ({byte_ranges(self.damaged, self.file.size_bytes)})"

    @property
    def matches_nothing(self) -> bool:
        """The file or its parity file is missing, or most of it."""
        return len(self.damaged) == -(-self.file.size_bytes // PARITY_BLOCK_BYTES) == len(self.beyond)

    @property
    def refusal(self) -> str | None:
        """Why it cannot be repaired, or None."""
        if not self.beyond:
            return None
        if self.matches_nothing:
            return self.description
        assert self.file.parity is not None
        where = byte_ranges(self.beyond, self.file.size_bytes)
        strength = f"parity {self.file.parity.code} cannot repair {_counted(self.beyond)} of them ({where})"
        return f"{self.description}; {strength}"


def _counted(blocks: Sequence[int]) -> str:
    return f"{len(blocks):,} block{'s' if len(blocks) != 1 else ''} of {PARITY_BLOCK_BYTES} bytes"


def byte_ranges(blocks: Sequence[int], size_bytes: int) -> str:
    """Describe the ranges of a file that blocks are, adjacent ones as one."""
    numbered = itertools.groupby(enumerate(blocks), key=lambda pair: pair[1] - pair[0])
    found = [[block for _, block in group] for _, group in numbered]
    shown = [
        f"{each[0] * PARITY_BLOCK_BYTES:,} to {min((each[-1] + 1) * PARITY_BLOCK_BYTES, size_bytes):,}"
        for each in found[:MOST_RANGES]
    ]
    more = f" and {len(found) - MOST_RANGES:,} more ranges" if len(found) > MOST_RANGES else ""
    return f"bytes {', '.join(shown)}{more}"


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


class _RepairedReader(FileReader):
    """Reads a damaged file, and puts recomputed blocks in their places."""

    def __init__(self, repaired: RepairedFile) -> None:
        self._blocks, self.size_bytes = repaired.blocks, repaired.file.size_bytes
        self._reader = repaired.reopen()

    def read_into(self, start: int, target: memoryview) -> None:
        self._reader.read_into(start, target)
        end = start + len(target)
        for number in range(start // PARITY_BLOCK_BYTES, -(-end // PARITY_BLOCK_BYTES)):
            if (block := self._blocks.get(number)) is not None:
                at = number * PARITY_BLOCK_BYTES
                first, last = max(start, at), min(end, at + len(block))
                target[first - start : last - start] = block[first - at : last - at]

    def close(self) -> None:
        self._reader.close()


def repair_in_memory(
    store: Store, job: str, checkpoint: str, file: fmt.File, *, pace: Pace | None = None
) -> RepairedFile:
    """Locate the damaged blocks of a payload file with parity, and recompute those that its parity allows.

    Takes memory of the size of the damage. What was recomputed is still to be verified: the table of digests may
    be damaged as well.

    Raises:
        DamagedCheckpoint: too much is missing, so that nothing else is read.
        OSError: the store cannot be read.
    """
    assert file.parity is not None
    layout = StripeLayout(file.parity.code, file.size_bytes)

    def opened(pace: Pace | None = None) -> BlockReader:
        return BlockReader(store, job, checkpoint, file.name, pace)

    with opened(pace) as data, BlockReader(store, job, checkpoint, file.parity.name, pace) as parity:
        if not parity.size_bytes:
            raise DamagedCheckpoint(file.name, f"{file.parity.name} is missing or empty as well")
        # sizes in a manifest may be wrong: read no more than a small multiple of what there is
        if file.size_bytes - data.size_bytes > layout.code.parity_blocks * layout.row_bytes:
            raise DamagedCheckpoint(
                file.name, f"parity {layout.code} cannot repair a file of which that much is missing"
            )
        tables = _DigestTables(layout, parity)
        damaged = list(_damaged_blocks(layout, data, tables))
        blocks: dict[int, memoryview] = {}
        beyond: list[int] = []
        for stripe, count, rows in _runs(layout, damaged):
            found = _recovered(layout, data, parity, tables, stripe, count, rows)
            lost = [row * layout.stripes + stripe + n for row in rows for n in range(count)]
            beyond += [block for block in lost if block not in found]
            blocks |= found
    return RepairedFile(file, opened, damaged, blocks, sorted(beyond))


class _DigestTables:
    """Both copies of the table of digests."""

    def __init__(self, layout: StripeLayout, parity: BlockReader) -> None:
        ends = [(start, min(start + layout.table_bytes, parity.size_bytes)) for start in (0, layout.copy_start)]
        self._copies = [parity.read(start, end) for start, end in ends if start < end]

    def match(self, entry: int, digest: bytes) -> bool:
        at = entry * ENTRY_BYTES
        return any(copy[at : at + ENTRY_BYTES] == digest for copy in self._copies)


def _damaged_blocks(layout: StripeLayout, data: BlockReader, tables: _DigestTables) -> Iterator[int]:
    for first in range(0, layout.blocks, SCAN_BLOCKS):
        start = first * PARITY_BLOCK_BYTES
        read = data.read(start, min(start + SCAN_BLOCKS * PARITY_BLOCK_BYTES, layout.payload_bytes))
        for number, digest in enumerate(block_digests(read), first):
            if not tables.match(number, digest):
                yield number


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
    data: BlockReader,
    parity: BlockReader,
    tables: _DigestTables,
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


def parity_matches(
    store: Store, job: str, checkpoint: str, entry: ParityFile, *, pace: Pace | None = None
) -> bool:
    """Read a parity file from its storage device, and return whether it is what was written."""
    digest = fmt.hasher()
    with (
        contextlib.suppress(DamagedCheckpoint),
        store.open_file(job, checkpoint, entry.name, from_disk=True) as opened,
    ):
        if opened.size_bytes != entry.size_bytes:
            return False
        memory = memoryview(fresh_memory(min(reading.READ_BYTES, max(1, entry.size_bytes))))
        for start in range(0, entry.size_bytes, len(memory)):
            piece = memory[: min(len(memory), entry.size_bytes - start)]
            if pace is not None:
                pace(len(piece))
            opened.read_into(start, piece)
            digest.update(piece)
        return digest.hexdigest() == entry.digest
    return False
