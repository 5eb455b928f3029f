"""Lossless compression of numbers as byte planes.

The bytes of numbers are separated by significance: the most significant bytes of all numbers, which hold signs
and exponents, form a plane, and so on. A plane that compresses is a Zstandard frame, the others are stored as
they are. A sample decides about each plane.

A block is encoded in segments of 262,144 numbers, which stay in the cache of a core. An encoded block begins
with a header in little-endian order: 4 bytes of magic, the width of a number, 3 zero bytes, the number of raw
bytes in 8 bytes, and for each plane of each segment, from the least significant on, its stored length in 4 bytes.
The planes follow in that order, and then the bytes behind the last whole number. A plane whose stored length is
the number of numbers is not compressed. The content of a frame has a known size, which a hostile frame cannot
exceed. Compressing releases the GIL.
"""

from __future__ import annotations

import struct
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

Buffer = Any
"""A contiguous buffer."""

suffix = ".planes"
"""How the names of files end that hold byte planes."""

_WINDOW_LOG = 17
# Mostly Huffman coding: repetitions are rare in the planes of numbers, and short ones do not pay.
_OPTIONS = {
    int(zstd.CompressionParameter.strategy): int(zstd.Strategy.fast),
    int(zstd.CompressionParameter.window_log): _WINDOW_LOG,
    int(zstd.CompressionParameter.hash_log): 10,
    int(zstd.CompressionParameter.min_match): 7,
}
_LIMITS = {int(zstd.DecompressionParameter.window_log_max): _WINDOW_LOG}
LEAST_GAIN = 0.1
"""A block that becomes smaller by a lower share is not worth encoding."""
_MAGIC, _ZEROS = b"HFbp", bytes(3)
_LEAST_GAIN_OF_PLANE = 0.05
_HEADER = struct.Struct("<4sB3sQ")
_WIDTHS = (1, 2, 4, 8)
_SAMPLE_NUMBERS, _RUNS = 4096, 16
_SEGMENT_NUMBERS = 1 << 18
Numbers = np.ndarray[Any, Any]


class DamagedEncoding(ValueError):
    """Encoded bytes are damaged, or belong to another block."""


class NumberCompressor:
    """Fast compression of bytes that hardly repeat. Its memory is used again for each frame."""

    def __init__(self) -> None:
        self._compressor = zstd.ZstdCompressor(options=_OPTIONS)

    def compress(self, data: Buffer) -> bytes:
        """Return a frame."""
        return bytes(self._compressor.compress(data, self._compressor.FLUSH_FRAME))


def decompress(frame: Buffer, size_bytes: int) -> bytes:
    """Return the content of a frame of `size_bytes`. Never takes much more memory than that.

    Raises:
        DamagedEncoding: this is no frame, or its content has another size.
    """
    decompressor = zstd.ZstdDecompressor(options=_LIMITS)
    try:
        content = bytes(decompressor.decompress(frame, max_length=size_bytes))
    except zstd.ZstdError as error:
        raise DamagedEncoding(f"a frame cannot be decompressed: {error}") from None
    if len(content) != size_bytes or not decompressor.eof or decompressor.unused_data:
        raise DamagedEncoding(f"a frame does not have the content of {size_bytes} bytes that the header names")
    return content


def encode(data: Buffer, width: int, least_gain: float = LEAST_GAIN) -> bytes | None:
    """Return `data` encoded, or None if that would save less than `least_gain`.

    Args:
        width: bytes of a number, 1, 2, 4 or 8: of a component, for complex numbers.
        least_gain: share of the bytes that the encoding must save.

    Raises:
        ValueError: the width is not supported.
    """
    if width not in _WIDTHS:
        raise ValueError(f"width is {width}; numbers have 1, 2, 4 or 8 bytes")
    raw = np.frombuffer(data, np.uint8)
    count = len(raw) // width
    numbers = raw[: count * width].view(f"<u{width}")
    compressor = NumberCompressor()
    compressed, expected = _shares(numbers[_sample(count)], compressor)
    if expected * count + header_bytes(width, len(raw)) > (1 - least_gain) * count * width:
        return None
    planes = [
        _compressed(plane, compressor) if compress else plane.tobytes()
        for start in range(0, count, _SEGMENT_NUMBERS)
        for plane, compress in zip(_split(numbers[start : start + _SEGMENT_NUMBERS]), compressed, strict=True)
    ]
    header = _HEADER.pack(_MAGIC, width, _ZEROS, len(raw))
    lengths = struct.pack(f"<{len(planes)}I", *map(len, planes))
    encoded = b"".join([header, lengths, *planes, raw[count * width :].tobytes()])
    return None if len(encoded) > (1 - least_gain) * len(raw) else encoded


def header_bytes(width: int, raw_bytes: int) -> int:
    """Return the bytes of an encoded block that are not content."""
    return _HEADER.size + 4 * width * -(-(raw_bytes // width) // _SEGMENT_NUMBERS)


def decode(encoded: Buffer, out: Buffer) -> None:
    """Decode into `out`, whose length is that of the block. Its content is undefined after an error.

    The memory that this takes is limited by the length of `out`. The caller compares the digest of the result.

    Raises:
        DamagedEncoding: the bytes are not an encoding of a block of that length.
    """
    view = memoryview(encoded).cast("B")
    raw = np.frombuffer(out, np.uint8)
    found = _layout_of(view, len(raw))
    numbers = raw[: found.numbers * found.width].view(f"<u{found.width}")
    for start in range(0, len(found.planes), found.width):
        planes = found.planes[start : start + found.width]
        segment = numbers[planes[0].first : planes[0].first + planes[0].count]
        _join([_decompressed(view[each.start : each.end], each.count) for each in planes], segment)
    raw[len(numbers) * found.width :] = np.frombuffer(view[found.end :], np.uint8)


def decode_partly(encoded: Buffer, out: Buffer, lost: Buffer) -> Buffer:
    """Decode into `out` as `decode` does, though some encoded bytes of planes are lost: these are zeros in `out`.

    A compressed plane is lost with any of its bytes. The header and the bytes behind the planes must be known.

    Args:
        lost: 255 for each encoded byte that is lost, and 0 for each other one.

    Returns:
        An array with 255 for each byte of `out` that is lost, and 0 for each other one.

    Raises:
        DamagedEncoding: what is not lost is no encoding of a block of that length.
    """
    view, missing = memoryview(encoded).cast("B"), np.frombuffer(lost, np.uint8)
    raw = np.frombuffer(out, np.uint8)
    found, lost_raw = _layout_of(view, len(raw)), np.zeros(len(raw), np.uint8)
    numbers, masks = (each[: found.numbers * found.width].view(f"<u{found.width}") for each in (raw, lost_raw))
    for start in range(0, len(found.planes), found.width):
        contents, gaps = [], []
        for plane in found.planes[start : start + found.width]:
            stored, gap = view[plane.start : plane.end], missing[plane.start : plane.end]
            if plane.is_compressed:
                is_lost = bool(gap.any())
                gap = np.full(plane.count, 255 if is_lost else 0, np.uint8)
                contents.append(np.zeros_like(gap) if is_lost else _decompressed(stored, plane.count))
            else:
                contents.append(np.frombuffer(stored, np.uint8) & ~gap)
            gaps.append(gap)
        segment = slice(found.planes[start].first, found.planes[start].first + found.planes[start].count)
        _join(contents, numbers[segment])
        _join(gaps, masks[segment])
    raw[found.numbers * found.width :] = np.frombuffer(view[found.end :], np.uint8)
    return lost_raw


@dataclass(frozen=True, slots=True)
class Plane:
    """A plane of a segment."""

    index: int
    """0 for the least significant bytes."""
    start: int
    """Offset in the encoded block."""
    end: int
    first: int
    """Number of the first of its numbers in the block."""
    count: int

    @property
    def is_compressed(self) -> bool:
        return self.end - self.start != self.count


@dataclass(frozen=True, slots=True)
class PlaneLayout:
    """Where the parts of an encoded block are."""

    width: int
    numbers: int
    header_bytes: int
    planes: list[Plane]
    end: int
    """Offset of the bytes behind the planes."""


def layout(encoded: Buffer) -> PlaneLayout:
    """Return where the planes of an encoded block are. DamagedEncoding if it has none."""
    view = memoryview(encoded).cast("B")
    return _layout_of(view, _header(view)[1])


def _layout_of(view: memoryview, expected_bytes: int) -> PlaneLayout:
    width, raw_bytes = _header(view)
    count = raw_bytes // width
    if raw_bytes != expected_bytes:
        raise DamagedEncoding(f"the block has {expected_bytes} bytes, and its encoding {raw_bytes}")
    place = header_bytes(width, raw_bytes)
    if len(view) < place:
        raise DamagedEncoding("the header is cut off")
    lengths = memoryview(view[_HEADER.size : place]).cast("I")
    if place + sum(lengths) + raw_bytes % width != len(view):
        raise DamagedEncoding("the lengths in the header do not match")
    opening, planes = place, []
    for number, length in enumerate(lengths):
        segment, index = divmod(number, width)
        first = segment * _SEGMENT_NUMBERS
        planes.append(Plane(index, place, place + length, first, min(_SEGMENT_NUMBERS, count - first)))
        place += length
    return PlaneLayout(width, count, opening, planes, place)


def _header(view: memoryview) -> tuple[int, int]:
    if len(view) < _HEADER.size:
        raise DamagedEncoding("the header is cut off")
    magic, width, zeros, raw_bytes = _HEADER.unpack_from(view)
    if magic != _MAGIC or width not in _WIDTHS or zeros != _ZEROS:
        raise DamagedEncoding("the header is not that of byte planes")
    return width, raw_bytes


def _sample(count: int) -> Any:
    """Return the places of a few evenly spaced runs of numbers, or all of few."""
    if count <= 2 * _SAMPLE_NUMBERS:
        return slice(None)
    length = _SAMPLE_NUMBERS // _RUNS
    starts = np.linspace(0, count - length, _RUNS).astype(np.intp)
    return (starts[:, None] + np.arange(length)).ravel()


def _shares(numbers: Numbers, compressor: NumberCompressor) -> tuple[list[bool], float]:
    """Return which planes compress, and the expected number of bytes of a number."""
    shares = [len(_compressed(plane, compressor)) / max(1, len(plane)) for plane in _split(numbers)]
    compressed = [share < 1 - _LEAST_GAIN_OF_PLANE for share in shares]
    return compressed, sum(share if compress else 1.0 for share, compress in zip(shares, compressed, strict=True))


def _compressed(plane: Numbers, compressor: NumberCompressor) -> bytes:
    """Return the plane as a frame, or as it is where that is not longer."""
    frame = compressor.compress(plane)
    return frame if len(frame) < len(plane) else plane.tobytes()


def _decompressed(stored: memoryview, count: int) -> Numbers:
    if len(stored) == count:
        return np.frombuffer(stored, np.uint8)
    return np.frombuffer(decompress(stored, count), np.uint8)


def _split(numbers: Numbers) -> list[Numbers]:
    """Return the planes of bytes, the least significant first."""
    if numbers.itemsize == 1:
        return [numbers]
    rows = numbers.view(np.uint8).reshape(-1, numbers.itemsize)
    return [np.ascontiguousarray(rows[:, index]) for index in range(numbers.itemsize)]


def _join(planes: list[Numbers], out: Numbers) -> None:
    out[:] = planes[-1]
    for plane in planes[-2::-1]:
        np.left_shift(out, 8, out=out)
        np.bitwise_or(out, plane, out=out)
