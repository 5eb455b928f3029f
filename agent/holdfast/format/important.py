"""The important bytes of a payload file: those whose loss would end a training.

Of each floating-point number these are the bytes with its sign and its exponent, except for the last bit of the
exponent where that begins the next byte. Of small tensors, of numbers without an exponent and of the header they
are all bytes. Of byte planes they are the planes of these bytes.

The important bytes in file order are a stream, which parity protects like a file. A list of ranges tells where
they are: it is stored, because the lengths of byte planes are known only from sound bytes. Does not import torch,
and numpy only where bytes are read.
"""

from __future__ import annotations

import bisect
import itertools
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from holdfast.format.encoding import CODEC, LAYERED, EncodedBlock, Encoding
from holdfast.format.manifest import File, Manifest, tensors_of
from holdfast.format.parity_file import RANGE_BYTES

IMPORTANT_BYTES = {"F16": (2, 1), "BF16": (2, 1), "F32": (4, 1), "C64": (4, 1), "F64": (8, 2)}
"""Bytes of a number, or of a part of a complex one, and how many of them, from the most significant on, are
important. Each byte of any other dtype is; fp8 has its exponent in its only byte."""
SMALL_BYTES = 4096
"""All bytes of a smaller tensor are important: step counters and scales cost nothing, and must be exact."""
_RANGE = struct.Struct(">QQBB6x")
assert _RANGE.size == RANGE_BYTES

Cut = Callable[[int, int], "memoryview | bytes"]
"""Returns a range of a file."""
Bytes = Any
"""A NumPy array of bytes."""


class PlacedTensor(NamedTuple):
    """The range of a tensor in the plain file."""

    start: int
    end: int
    dtype: str

    @property
    def number(self) -> tuple[int, int]:
        """Bytes of a number, and how many of them are important."""
        is_small = self.end - self.start < SMALL_BYTES
        return (1, 1) if is_small else IMPORTANT_BYTES.get(self.dtype, (1, 1))


class FileContents(NamedTuple):
    """What a payload file consists of."""

    header_bytes: int
    tensors: Iterable[PlacedTensor]
    encoding: Encoding | None


def contents_of(manifest: Manifest, file: File) -> FileContents:
    """Return what a payload file consists of, which tells important bytes from others."""
    tensors = (PlacedTensor(each.start, each.end, each.dtype) for each in tensors_of(manifest, file.name))
    return FileContents(file.header_bytes, tensors, file.encoding)


class ImportantRange(NamedTuple):
    """A range of the stored file: numbers of `width` bytes, of which the last `kept` are important."""

    start: int
    end: int
    width: int = 1
    kept: int = 1

    @property
    def size_bytes(self) -> int:
        return (self.end - self.start) // self.width * self.kept


class ImportantRanges:
    """Where the important bytes of a file are."""

    def __init__(self, ranges: Iterable[ImportantRange]) -> None:
        self.ranges = list(ranges)
        self._at = [0, *itertools.accumulate(each.size_bytes for each in self.ranges)]
        """Where each range begins in the stream."""
        self._starts = [each.start for each in self.ranges]
        self.size_bytes = self._at[-1]
        """Size of the stream."""

    def gather(self, cut: Cut, start: int, end: int) -> memoryview:
        """Return a range of the stream, given the bytes of the file."""
        pieces: list[Any] = []
        for found, first, last in self._slices(start, end):
            if found.kept == found.width:
                pieces.append(cut(found.start + first, found.start + last))
                continue
            import numpy as np

            one, upto = first // found.kept, -(-last // found.kept)
            data = np.frombuffer(cut(found.start + one * found.width, found.start + upto * found.width), np.uint8)
            kept = np.ascontiguousarray(data.reshape(-1, found.width)[:, found.width - found.kept :]).reshape(-1)
            pieces.append(kept[first - one * found.kept : last - one * found.kept].data)
        return memoryview(pieces[0] if len(pieces) == 1 else b"".join(pieces))

    def positions(self, start: int, end: int) -> Bytes:
        """Return where in the file the bytes of a range of the stream are."""
        import numpy as np

        found = [np.empty(0, np.int64)]
        for each, first, last in self._slices(start, end):
            number, byte = np.divmod(np.arange(first, last), each.kept)
            found.append(each.start + number * each.width + each.width - each.kept + byte)
        return np.concatenate(found)

    def unimportant(self, start: int, end: int) -> Bytes:
        """Return an array with 255 for each byte of a range of the file that is not important, 0 for others."""
        import numpy as np

        mask = np.full(end - start, 255, np.uint8)
        for each in self.ranges[max(0, bisect.bisect_right(self._starts, start) - 1) :]:
            if each.start >= end:
                break
            first, last = max(start, each.start), min(end, each.end)
            if first < last:
                inside = (np.arange(first, last) - each.start) % each.width >= each.width - each.kept
                mask[first - start : last - start][inside] = 0
        return mask

    def before(self, position: int) -> int:
        """Return how many bytes of the stream are in front of a position of the file."""
        index = bisect.bisect_right(self._starts, position) - 1
        if index < 0:
            return 0
        found = self.ranges[index]
        inside = ImportantRange(found.start, min(position, found.end), found.width, found.kept)
        return self._at[index] + inside.size_bytes

    def _slices(self, start: int, end: int) -> Iterator[tuple[ImportantRange, int, int]]:
        """Yield the ranges that a part of the stream is in, with the first and last of their important bytes."""
        index = bisect.bisect_right(self._at, start) - 1
        while start < end:
            upto = min(end, self._at[index + 1])
            if start < upto:
                yield self.ranges[index], start - self._at[index], upto - self._at[index]
            start, index = upto, index + 1

    def encode(self) -> bytes:
        return b"".join(_RANGE.pack(*each) for each in self.ranges)

    @classmethod
    def decode(cls, data: bytes, file_bytes: int) -> ImportantRanges | None:
        """Return the ranges in `data`; None if they cannot be those of a file of that size."""
        ranges = [ImportantRange(*fields) for fields in _RANGE.iter_unpack(data)]
        at = 0
        for each in ranges:
            is_number = each.width in (1, 2, 4, 8) and 1 <= each.kept <= each.width
            if not (is_number and at <= each.start < each.end <= file_bytes):
                return None
            if (each.end - each.start) % each.width:
                return None
            at = each.end
        return cls(ranges)


def important_ranges(cut: Cut, contents: FileContents) -> ImportantRanges:
    """Find the important bytes of a stored file, given a function that returns its bytes."""
    header = PlacedTensor(0, contents.header_bytes, "")
    placed = [header, *sorted(each for each in contents.tensors if each.start < each.end)]
    encoding = contents.encoding
    found: list[ImportantRange] = []
    for each in _plain(placed) if encoding is None else _encoded(cut, placed, encoding):
        last = found[-1] if found else None
        if last is not None and (last.end, last.width, last.kept) == (each.start, each.width, each.kept):
            found[-1] = ImportantRange(last.start, each.end, each.width, each.kept)
        else:
            found.append(each)
    return ImportantRanges(found)


def _plain(tensors: Sequence[PlacedTensor], moved: int = 0) -> Iterator[ImportantRange]:
    return (ImportantRange(each.start + moved, each.end + moved, *each.number) for each in tensors)


def _encoded(cut: Cut, tensors: Sequence[PlacedTensor], encoding: Encoding) -> Iterator[ImportantRange]:
    starts = [each.start for each in tensors]
    places = zip(encoding.blocks, encoding.raw_starts, encoding.stored_starts, strict=False)
    for block, raw, stored in places:
        first = max(0, bisect.bisect_right(starts, raw) - 1)
        last = bisect.bisect_left(starts, raw + block.raw_bytes)
        inside = [
            (max(each.start, raw) - raw, min(each.end, raw + block.raw_bytes) - raw, each)
            for each in tensors[first:last]
            if each.end > raw
        ]
        if block.stored_bytes == block.raw_bytes:
            for start, end, each in inside:
                yield ImportantRange(stored + start, stored + end, *each.number)
        elif encoding.codec not in (CODEC, LAYERED):  # any byte of what another package encoded may be important
            yield ImportantRange(stored, stored + block.stored_bytes)
        else:
            yield from _planes(cut, block, stored, inside)


def _planes(
    cut: Cut, block: EncodedBlock, stored: int, tensors: Sequence[tuple[int, int, PlacedTensor]]
) -> Iterator[ImportantRange]:
    """Yield the important ranges of a block of byte planes, which is stored at `stored`.

    Of a plane that is not important, still the bytes of tensors are whose every byte is: a compressed plane as a
    whole, which is lost with any of its bytes.
    """
    from holdfast.codecs import planes

    data = memoryview(cut(stored, stored + block.stored_bytes))
    layout = planes.layout(data)
    kept = max(each.number[1] if each.number != (1, 1) else 1 for _, _, each in tensors)
    whole = [
        (start // layout.width, -(-end // layout.width)) for start, end, each in tensors if each.number == (1, 1)
    ]
    yield ImportantRange(stored, stored + layout.header_bytes)
    for plane in layout.planes:
        start, end = stored + plane.start, stored + plane.end
        if start == end:
            continue
        if plane.index >= layout.width - kept:
            yield ImportantRange(start, end)
            continue
        for first, last in whole:
            first, last = max(first, plane.first) - plane.first, min(last, plane.first + plane.count) - plane.first
            if first >= last:
                continue
            if plane.is_compressed:
                yield ImportantRange(start, end)
                break
            yield ImportantRange(start + first, start + last)
    if layout.end < len(data):
        yield ImportantRange(stored + layout.end, stored + len(data))
