"""Read checkpoints of which only the important bytes are left, and replace the other bytes that are lost.

A lost number keeps its sign and exponent, and gets the middle of the possible values of its other bytes.
Everything else is verified as by any read. Does not import torch.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import msgspec

from holdfast.checkpoint.reading import FileRange, ranges_to_verify
from holdfast.checkpoint.repair import RepairedFile, read_repairing, repair_in_memory
from holdfast.errors import DamagedCheckpoint
from holdfast.format import manifest as fmt
from holdfast.format.encoding import Encoding
from holdfast.format.file_transforms import decode_block
from holdfast.format.important import IMPORTANT_BYTES
from holdfast.format.parity_file import PARITY_BLOCK_BYTES
from holdfast.protocol.ids import checkpoint_id
from holdfast.store import Store
from holdfast.store.base import FileReader, Pace
from holdfast.units import percent

INFINITY = {"F16": 0x7C00, "BF16": 0x7F80, "F32": 0x7F80_0000, "C64": 0x7F80_0000, "F64": 0x7FF0 << 48}
MOST_NAMED = 5
"""Tensors that a description of lost numbers names."""
Bytes = Any
"""A NumPy array of bytes."""


class LostNumbers(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of a tensor whose less significant bytes are lost and were replaced."""

    tensor: str
    rank: int | None
    """The only rank that uses the tensor; None for a tensor that all ranks share."""
    lost: int
    numbers: int
    """All numbers of the tensor, as far as they were read."""
    low_bytes: int
    """Bytes of a number that may be lost."""


def describe_lost(lost: Sequence[LostNumbers]) -> str:
    """Name what a degraded restore replaces: tensors, the share of their numbers, and how many bytes of each."""
    names = list(dict.fromkeys(each.tensor for each in lost))
    count, numbers = sum(each.lost for each in lost), sum(each.numbers for each in lost)
    widths = sorted({each.low_bytes for each in lost})
    low = "low byte" if widths == [1] else f"low {' or '.join(map(str, widths))} bytes"
    named = ", ".join(names[:MOST_NAMED]) + (", …" if len(names) > MOST_NAMED else "")
    tensors = f"{len(names)} tensor{'s' if len(names) != 1 else ''}"
    return f"the {low} of {count:,} numbers, {percent(count / max(1, numbers))} of those of {tensors}: {named}"


def read_degraded(
    store: Store, job: str, checkpoint: str, ranges: Sequence[FileRange], **options: Any
) -> tuple[list[str], list[LostNumbers]]:
    """Read `ranges` as `read_repairing` does, and replace lost bytes where only important ones are left.

    Returns:
        Descriptions of the damage to files that were repaired, and the numbers that are not exact.

    Raises:
        DamagedCheckpoint: important bytes are lost, or damage is not covered by important parity.
    """
    repaired, lost = list[str](), list[LostNumbers]()
    by_file = itertools.groupby(sorted(ranges, key=_file_name), key=_file_name)
    for _, group in by_file:
        of_file = list(group)
        file = of_file[0].file
        try:
            repaired += read_repairing(store, job, checkpoint, of_file, **options)
        except DamagedCheckpoint:
            if file.parity is None or not file.parity.code.is_important:
                raise
            found = repair_in_memory(store, job, checkpoint, file, pace=options.get("pace"))
            if not found.is_degradable:
                raise
            lost += _read_partly(found, of_file)
    return repaired, _joined(lost)


def describe_degraded(store: Store, job: str, manifest: fmt.Manifest, *, pace: Pace | None = None) -> str | None:
    """Name what a degraded restore of a damaged checkpoint would replace; None where none is possible or needed.

    Reads the files with important parity once more. DamagedCheckpoint where important bytes are lost.
    """
    checkpoint, lost = checkpoint_id(manifest.iteration, manifest.lineage), list[LostNumbers]()
    for file in manifest.files:
        if file.parity is None or not file.parity.code.is_important:
            continue
        found = repair_in_memory(store, job, checkpoint, file, pace=pace)
        if found.is_degradable:
            lost += _read_partly(found, ranges_to_verify(manifest, file), keep=False)
    return describe_lost(_joined(lost)) if lost else None


def _file_name(found: FileRange) -> str:
    return found.file.name


def _joined(lost: Sequence[LostNumbers]) -> list[LostNumbers]:
    """Add up the lost numbers of the chunks of each tensor, and leave out tensors that are exact."""
    key = attrgetter("tensor", "rank", "low_bytes")
    grouped = itertools.groupby(sorted(lost, key=lambda each: (each.tensor, each.rank or 0)), key=key)
    summed = []
    for (tensor, rank, low_bytes), group in grouped:
        pieces = list(group)
        count = sum(each.lost for each in pieces)
        if count:
            numbers = sum(each.numbers for each in pieces)
            summed.append(LostNumbers(tensor=tensor, rank=rank, lost=count, numbers=numbers, low_bytes=low_bytes))
    return summed


def _read_partly(found: RepairedFile, ranges: Iterable[FileRange], *, keep: bool = True) -> Iterator[LostNumbers]:
    """Read ranges of a file, and yield the lost numbers of each of their tensors."""
    if found.file.encoding is not None and found.file.keeps_positions:  # the files laid over it count as well
        raise DamagedCheckpoint(found.file.name, "is not restored in part: other files are laid over it")
    with found.open() as reader:
        partial = _PartialReader(found, reader)
        for each in ranges:
            each.reserve()
            for covered in each.digests:
                data = each.view(covered.start, covered.end)
                missing = partial.read_into(covered.start, data)
                if not missing.any():
                    fmt.check_digest(found.file, covered, fmt.digest(data))
                if covered.tensor is None or covered.tensor.dtype not in IMPORTANT_BYTES:
                    if missing.any():  # all of its bytes are important
                        raise DamagedCheckpoint(found.file.name, f"{covered} is lost")
                    continue
                width, kept = IMPORTANT_BYTES[covered.tensor.dtype]
                yield LostNumbers(
                    tensor=covered.tensor.name,
                    rank=covered.tensor.rank,
                    lost=replace_lost(data, missing, covered.tensor.dtype),
                    numbers=len(data) // width,
                    low_bytes=width - kept,
                )
            if not keep:
                each.memory = None


def replace_lost(data: memoryview, missing: Bytes, dtype: str) -> int:
    """Replace lost bytes of numbers by the middle of their possible values; return the count of these numbers.

    Infinity stays infinity: the middle of its possible values is not a number.

    Args:
        missing: 255 for each byte that is lost, 0 for others.
    """
    import numpy as np

    width, _ = IMPORTANT_BYTES[dtype]
    lost = missing.reshape(-1, width)
    rows = np.flatnonzero(lost.any(axis=1))
    if not len(rows):
        return 0
    lost = np.ascontiguousarray(lost[rows])
    middle, is_first = np.zeros_like(lost), np.ones(len(rows), bool)
    for index in reversed(range(width)):
        here = is_first & (lost[:, index] != 0)
        middle[here, index] = 0x80
        is_first &= ~here
    kind = f"<u{width}"
    numbers = np.frombuffer(data, kind)
    known = numbers[rows] & ~lost.view(kind).ravel()
    sign = np.array(1 << (8 * width - 1), kind)
    is_infinite = (known & ~sign) == np.array(INFINITY[dtype], kind)
    numbers[rows] = np.where(is_infinite, known, known | middle.view(kind).ravel())
    return len(rows)


class _PartialReader:
    """Reads the plain bytes of a file of which some blocks have only their important bytes."""

    def __init__(self, found: RepairedFile, reader: FileReader) -> None:
        assert found.important is not None
        self._file, self._reader = found.file, reader
        self._ranges, self._lost = found.important.ranges, found.important.lost
        self._block: tuple[int, Any, Bytes] | None = None
        """Number, content and lost bytes of the last encoded block: many small tensors are in the same one."""

    def read_into(self, start: int, target: memoryview) -> Bytes:
        """Read the plain bytes from `start` on, and return 255 for each one that is lost, 0 for others."""
        if self._file.encoding is None:
            self._reader.read_into(start, target)
            return self._missing(start, start + len(target))
        return self._read_encoded(self._file.encoding, start, target)

    def _missing(self, start: int, end: int) -> Bytes:
        """Return the lost bytes of a range of the stored file."""
        import numpy as np

        missing = np.zeros(end - start, np.uint8)
        first = bisect.bisect_left(self._lost, start // PARITY_BLOCK_BYTES)
        last = bisect.bisect_left(self._lost, -(-end // PARITY_BLOCK_BYTES))
        for number in self._lost[first:last]:
            at = max(start, number * PARITY_BLOCK_BYTES)
            upto = min(end, (number + 1) * PARITY_BLOCK_BYTES)
            missing[at - start : upto - start] = self._ranges.unimportant(at, upto)
        return missing

    def _read_encoded(self, encoding: Encoding, start: int, target: memoryview) -> Bytes:
        import numpy as np

        missing, end = np.zeros(len(target), np.uint8), start + len(target)
        first = bisect.bisect_right(encoding.raw_starts, start) - 1
        last = bisect.bisect_left(encoding.raw_starts, end)
        for number in range(first, last):
            raw, lost = self._decoded(encoding, number)
            begins = encoding.raw_starts[number]
            at, upto = max(start, begins), min(end, begins + len(raw))
            target[at - start : upto - start] = raw[at - begins : upto - begins]
            missing[at - start : upto - start] = lost[at - begins : upto - begins]
        return missing

    def _decoded(self, encoding: Encoding, number: int) -> tuple[memoryview, Bytes]:
        if self._block is not None and self._block[0] == number:
            return self._block[1], self._block[2]
        from holdfast.codecs import planes

        block, start = encoding.blocks[number], encoding.stored_starts[number]
        stored, raw = memoryview(bytearray(block.stored_bytes)), memoryview(bytearray(block.raw_bytes))
        self._reader.read_into(start, stored)
        lost = self._missing(start, start + len(stored))
        try:
            if not lost.any():
                if reason := decode_block(encoding.codec, block, stored, raw):
                    raise DamagedCheckpoint(self._file.name, f"encoded block {number} {reason}")
                lost = self._nothing(len(raw))
            elif block.stored_bytes == block.raw_bytes:
                raw[:] = stored
            else:
                lost = planes.decode_partly(stored, raw, lost)
        except planes.DamagedEncoding as error:
            raise DamagedCheckpoint(
                self._file.name, f"encoded block {number} cannot be decoded: {error}"
            ) from None
        self._block = number, raw, lost
        return raw, lost

    @staticmethod
    def _nothing(size_bytes: int) -> Bytes:
        import numpy as np

        return np.zeros(size_bytes, np.uint8)
