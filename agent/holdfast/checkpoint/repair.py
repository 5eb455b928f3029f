"""Recompute damaged blocks of a checkpoint's files from their parity files, in memory. Does not import torch."""

from __future__ import annotations

import contextlib
import itertools
import posixpath
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from holdfast.checkpoint import reading
from holdfast.checkpoint.block_repair import BlockReader, DigestTables, find_damaged, recover_blocks
from holdfast.checkpoint.decoding import decoded
from holdfast.checkpoint.reading import FileRange, Progress
from holdfast.checkpoint.stored_manifest import read_stored
from holdfast.errors import DamagedCheckpoint
from holdfast.format import manifest as fmt
from holdfast.format.important import ImportantRanges
from holdfast.format.parity_file import PARITY_BLOCK_BYTES, RANGE_BYTES, ImportantStream, ParityFile
from holdfast.format.parity_stripes import StripeLayout, block_digests
from holdfast.store import Store
from holdfast.store.base import FileReader, Pace
from holdfast.system.host_memory import fresh_memory

MOST_NUMBER_BYTES = 8
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

    A file that parity cannot repair is read from the copy elsewhere, if there is one. A further read follows only
    for the ranges that are not complete. With `from_disk`, bytes that are kept come from the device as well.

    Returns:
        A description of the damage to each file that was repaired in memory.
    """
    done: set[int] = set()
    sources = _Sources(store, job, checkpoint, from_disk or not keep)
    total_bytes = sum(each.end - each.start for each in ranges)

    def deliver(each: FileRange) -> None:
        if sink is not None:
            sink(each)
        done.add(id(each))

    def advance(now_bytes: int, left_bytes: int) -> None:
        if progress is not None:
            progress(total_bytes - left_bytes + now_bytes, total_bytes)

    while True:
        left = [each for each in ranges if id(each) not in done]
        try:
            reading.read(
                *(store, job, checkpoint, left),
                open_file=sources.open_file, keep=keep, sink=deliver, progress=advance, **options,
            )  # fmt: skip
        except DamagedCheckpoint as damage:
            file = _damaged_file(damage, left) or _damaged_layer(store, job, checkpoint, damage)
            if file is None or file.name in sources.elsewhere:
                raise
            sources.replace(file, damage, options.get("pace"))
        else:
            return sources.descriptions


@dataclass
class _Sources:
    """Sources of a checkpoint's files: the store, memory after a repair, or the copy elsewhere."""

    store: Store
    job: str
    checkpoint: str
    from_disk: bool
    repaired: dict[str, RepairedFile] = field(default_factory=dict)
    elsewhere: dict[str, str] = field(default_factory=dict)
    """Damage of the files that are read from the copy elsewhere."""
    other: Store | None = None

    def open_file(self, file: fmt.File) -> FileReader:
        if file.name in self.repaired:
            return decoded(file, self.repaired[file.name].open(), self._open_layer)
        return reading.open_whole(
            *(self._store_of(file.name), self.job, self.checkpoint, file),
            from_disk=self.from_disk, open_layer=self._open_layer,
        )  # fmt: skip

    def _open_layer(self, name: str) -> FileReader:
        if name in self.repaired:
            return self.repaired[name].open()
        return self._store_of(name).open_file(self.job, self.checkpoint, name, from_disk=self.from_disk)

    def _store_of(self, name: str) -> Store:
        return self.other if self.other is not None and name in self.elsewhere else self.store

    def replace(self, file: fmt.File, damage: DamagedCheckpoint, pace: Pace | None) -> None:
        """Repair a damaged file in memory, or use its copy. Raises DamagedCheckpoint where neither is possible."""
        known = self.repaired.pop(file.name, None)
        try:
            self.repaired[file.name] = _repair(
                self.store, self.job, self.checkpoint, file, damage, known, pace=pace
            )
        except DamagedCheckpoint as refused:
            if (other := self.store.copy_elsewhere(self.job, self.checkpoint)) is None:
                raise
            self.other, self.elsewhere[file.name] = other, refused.reason

    @property
    def descriptions(self) -> list[str]:
        """The damage to each file that is not read as it is in the store."""
        found = [f"{name}: {each.description}" for name, each in self.repaired.items()]
        if self.other is not None:
            found += [
                f"{name}: {what}; it was read from {self.other.url}" for name, what in self.elsewhere.items()
            ]
        return found


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
    if file.parity is None:
        raise damage
    if known is not None:
        raise DamagedCheckpoint(file.name, f"{damage.reason}; {known.refusal or known.description}") from None
    try:
        return repair_in_memory(store, job, checkpoint, file, pace=pace)
    except DamagedCheckpoint as refused:
        raise DamagedCheckpoint(file.name, f"{damage.reason}; {refused.reason}") from None


def _damaged_file(damage: DamagedCheckpoint, ranges: Sequence[FileRange]) -> fmt.File | None:
    name = posixpath.basename(damage.file)
    return next((each.file for each in ranges if each.file.name == name), None)


def _damaged_layer(store: Store, job: str, checkpoint: str, damage: DamagedCheckpoint) -> fmt.File | None:
    """Return the damaged file if it is a layer, which is in no range."""
    name = posixpath.basename(damage.file)
    if not name.endswith(fmt.REGION_SUFFIX):
        return None
    manifest = read_stored(store, job, checkpoint).manifest
    return next((each for each in manifest.files if each.name == name), None)


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
    important: ImportantRepair | None = None
    """Repair by important parity; `blocks` and `beyond` then refer to the stream of important bytes."""

    def open(self) -> FileReader:
        """Open the file as it was written. Its digests are still to be verified."""
        if self.important is None:
            return _RepairedReader(self)
        return _ImportantRepairedReader(self.reopen(), self.important.ranges, self.blocks)

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
        assert self.file.parity is not None
        blocks = self.file.parity.layout(self.file.size_bytes).blocks
        return len(self.damaged) == -(-self.file.size_bytes // PARITY_BLOCK_BYTES) and len(self.beyond) == blocks

    @property
    def refusal(self) -> str | None:
        """Why it cannot be repaired, or None."""
        assert self.file.parity is not None
        code = self.file.parity.code
        if self.matches_nothing:
            return self.description
        if self.important is not None:
            if not self.is_degradable:
                kept = f"parity {code} cannot repair all important bytes of them"
                return f"{self.description}; {kept}" if self.beyond or not self.important.is_sound else None
            where = byte_ranges(self.important.lost, self.file.size_bytes)
            of = "them" if self.important.lost == self.damaged else f"{_counted(self.important.lost)} ({where})"
            return (
                f"{self.description}; their important bytes are repaired, but the other bytes of {of} are lost, "
                "which only a degraded restore replaces"
            )
        if not self.beyond:
            return None
        where = byte_ranges(self.beyond, self.file.size_bytes)
        return f"{self.description}; parity {code} cannot repair {_counted(self.beyond)} of them ({where})"

    @property
    def is_degradable(self) -> bool:
        """All important bytes are known, and others are lost."""
        return (
            self.important is not None
            and self.important.is_sound
            and not self.beyond
            and bool(self.important.lost)
        )


@dataclass(frozen=True)
class ImportantRepair:
    """The important bytes of a damaged file."""

    ranges: ImportantRanges
    is_sound: bool
    """Whether they match their digest in the manifest, after the repair."""
    lost: list[int]
    """Numbers of the blocks of the file whose other bytes are lost."""


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


class _ImportantRepairedReader(FileReader):
    """Reads a damaged file, and puts recomputed blocks of its important bytes in their places."""

    def __init__(self, reader: BlockReader, ranges: ImportantRanges, blocks: dict[int, memoryview]) -> None:
        self._reader, self._ranges, self._blocks = reader, ranges, blocks
        self.size_bytes = reader.size_bytes

    def read_into(self, start: int, target: memoryview) -> None:
        import numpy as np

        self._reader.read_into(start, target)
        end, out = start + len(target), np.frombuffer(target, np.uint8)
        first = self._ranges.before(start) // PARITY_BLOCK_BYTES
        # a number that `end` cuts has some of its important bytes in front of it
        last = (self._ranges.before(end) + MOST_NUMBER_BYTES) // PARITY_BLOCK_BYTES
        for number in range(first, last + 1):
            if (block := self._blocks.get(number)) is None:
                continue
            at = number * PARITY_BLOCK_BYTES
            places = self._ranges.positions(at, at + len(block))
            inside = (start <= places) & (places < end)
            out[places[inside] - start] = np.frombuffer(block, np.uint8)[inside]

    def close(self) -> None:
        self._reader.close()


def repair_in_memory(
    store: Store, job: str, checkpoint: str, file: fmt.File, *, pace: Pace | None = None
) -> RepairedFile:
    """Locate the damaged blocks of a payload file with parity, and recompute those that its parity allows.

    It takes memory of the size of the damage. Recomputed blocks must still be verified: the table of digests may
    be damaged as well.

    Raises:
        DamagedCheckpoint: too much is missing, so that nothing else is read.
        OSError: the store cannot be read.
    """
    assert file.parity is not None
    layout = file.parity.layout(file.size_bytes)

    def opened(pace: Pace | None = None) -> BlockReader:
        return BlockReader(store, job, checkpoint, file.name, pace)

    with opened(pace) as data, BlockReader(store, job, checkpoint, file.parity.name, pace) as parity:
        if not parity.size_bytes:
            raise DamagedCheckpoint(file.name, f"{file.parity.name} is missing or empty as well")
        if file.parity.important is not msgspec.UNSET:
            return _repair_important(file, file.parity.important, layout, data, parity, opened)
        _require_most(file, layout, data.size_bytes)
        tables = DigestTables(parity, layout.start, layout.copy_start, layout.table_bytes)
        damaged, _ = find_damaged(layout.payload_bytes, data, tables)
        blocks, beyond = recover_blocks(layout, data, parity, tables, damaged)
    return RepairedFile(file, opened, damaged, blocks, beyond)


def _require_most(file: fmt.File, layout: StripeLayout, present_bytes: int) -> None:
    """Raise DamagedCheckpoint if more of the protected bytes is missing than parity can repair.

    Sizes in a manifest may be wrong: read at most a small multiple of the stored bytes.
    """
    if layout.payload_bytes - present_bytes > layout.code.parity_blocks * layout.row_bytes:
        raise DamagedCheckpoint(
            file.name, f"parity {layout.code} cannot repair a file of which that much is missing"
        )


def _repair_important(
    file: fmt.File,
    entry: ImportantStream,
    layout: StripeLayout,
    data: BlockReader,
    parity: BlockReader,
    opened: Callable[[], BlockReader],
) -> RepairedFile:
    """Repair the important bytes of a file, and list the blocks whose other bytes are lost."""
    ranges = _important_ranges(file, entry, layout, parity)
    _require_most(file, layout, ranges.before(data.size_bytes))
    ranges_bytes = entry.ranges * RANGE_BYTES
    guide = DigestTables(
        parity, ranges_bytes, layout.end + ranges_bytes, entry.guide_bytes(file.size_bytes) - ranges_bytes
    )
    damaged, _ = find_damaged(file.size_bytes, data, guide)
    stream = _ImportantReader(data, ranges)
    tables = DigestTables(parity, layout.start, layout.copy_start, layout.table_bytes)
    wrong, digests = find_damaged(layout.payload_bytes, stream, tables)
    blocks, beyond = recover_blocks(layout, stream, parity, tables, wrong)
    for number, block in blocks.items():
        digests[number] = next(block_digests(block))
    lost = []
    with _ImportantRepairedReader(opened(), ranges, blocks) as repaired:
        for number in damaged:
            start = number * PARITY_BLOCK_BYTES
            block = memoryview(bytearray(min(PARITY_BLOCK_BYTES, file.size_bytes - start)))
            repaired.read_into(start, block)
            if not guide.match(number, next(block_digests(block))):
                lost.append(number)
    is_sound = fmt.digest(b"".join(digests)) == entry.digest
    return RepairedFile(file, opened, damaged, blocks, beyond, ImportantRepair(ranges, is_sound, lost))


def _important_ranges(
    file: fmt.File, entry: ImportantStream, layout: StripeLayout, parity: BlockReader
) -> ImportantRanges:
    """Read the positions of the important bytes from a copy of the guide."""
    assert file.parity is not None
    size_bytes = entry.ranges * RANGE_BYTES
    for start in (0, layout.end):
        if start + size_bytes > parity.size_bytes:
            continue
        found = parity.read(start, start + size_bytes)
        if fmt.digest(found) == entry.ranges_digest:
            ranges = ImportantRanges.decode(bytes(found), file.size_bytes)
            if ranges is not None and ranges.size_bytes == entry.size_bytes:
                return ranges
    raise DamagedCheckpoint(file.name, f"both guides of {file.parity.name} are damaged as well")


class _ImportantReader:
    """Reads the stream of the important bytes of a file."""

    def __init__(self, data: BlockReader, ranges: ImportantRanges) -> None:
        self._data, self._ranges = data, ranges

    def read(self, start: int, end: int) -> memoryview:
        return self._ranges.gather(self._data.read, start, end)


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
