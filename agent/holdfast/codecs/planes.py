"""Lossless compression of numbers: byte planes, and optionally the difference from an earlier state.

The bytes of numbers are separated by significance: the most significant bytes of all numbers, which hold signs
and exponents, form a plane, and so on. A plane that compresses is a Zstandard frame, the others are stored as
they are. With a base, the planes are those of the differences from the base as integers, which are small
numbers where the two states are close. A sample decides about each plane and about the base.

A block is encoded in segments of 262,144 numbers, which stay in the cache of a core. An encoded block begins
with a header in little-endian order: 4 bytes of magic, the width of a number, 1 with a base or else 0, two zero
bytes, the number of raw bytes in 8 bytes, and for each plane of each segment, from the least significant on,
its stored length in 4 bytes. The planes follow in that order, and then the bytes behind the last whole number.
A plane whose stored length is the number of numbers is not compressed.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from .frames import Buffer, DamagedEncoding, NumberCompressor, decompress

LEAST_GAIN = 0.1
"""A block that becomes smaller by a lower share is not worth encoding."""
LEAST_GAIN_OF_BASE = 0.05
"""Nor is a base, on which a restore then depends, that makes the encoded block smaller by a lower share."""

_MAGIC = b"HFbp"
_LEAST_GAIN_OF_PLANE = 0.05
_HEADER = struct.Struct("<4sBBHQ")
_WIDTHS = (1, 2, 4, 8)
_SAMPLE_NUMBERS, _RUNS = 4096, 16
_SEGMENT_NUMBERS = 1 << 18

Numbers = np.ndarray[Any, Any]


def encode(
    data: Buffer,
    width: int,
    base: Buffer | None = None,
    least_gain: float = LEAST_GAIN,
    least_gain_of_base: float = LEAST_GAIN_OF_BASE,
) -> bytes | None:
    """Return `data` encoded, or None if that would save less than `least_gain`.

    Args:
        data: the bytes of one block.
        width: bytes of a number, 1, 2, 4 or 8: of a component, for complex numbers.
        base: bytes of the same block at an earlier time, of the same length. They are used only if they help, see
            `needs_base`.
        least_gain: share of the bytes that the encoding must save.
        least_gain_of_base: share of the bytes without a base that the base must save.

    Raises:
        ValueError: the width is not supported, or the base has another length.
    """
    if width not in _WIDTHS:
        raise ValueError(f"width is {width}; numbers have 1, 2, 4 or 8 bytes")
    raw = np.frombuffer(data, np.uint8)
    count = len(raw) // width
    numbers = raw[: count * width].view(f"<u{width}")
    earlier = None
    if base is not None:
        if memoryview(base).nbytes != len(raw):
            raise ValueError(f"the base has {memoryview(base).nbytes} bytes, the block {len(raw)}")
        earlier = np.frombuffer(base, np.uint8)[: count * width].view(f"<u{width}")
    compressor = NumberCompressor()
    compressed, uses_base, expected = _plan(numbers, earlier, least_gain_of_base, compressor)
    if expected > (1 - least_gain) * count * width:
        return None
    if not uses_base:
        earlier = None
    planes = [
        _compressed(plane, compressor) if compress else plane.tobytes()
        for start in range(0, count, _SEGMENT_NUMBERS)
        for plane, compress in zip(_split(_segment(numbers, earlier, start)), compressed, strict=True)
    ]
    header = _HEADER.pack(_MAGIC, width, earlier is not None, 0, len(raw))
    lengths = struct.pack(f"<{len(planes)}I", *map(len, planes))
    encoded = b"".join([header, lengths, *planes, raw[count * width :].tobytes()])
    return None if len(encoded) > (1 - least_gain) * len(raw) else encoded


def needs_base(encoded: Buffer) -> bool:
    """Whether the encoded block is the difference from a base.

    Raises:
        DamagedEncoding: `encoded` does not begin with a header.
    """
    return _header(memoryview(encoded).cast("B"))[1]


def header_bytes(width: int, raw_bytes: int) -> int:
    """Return the bytes of an encoded block that are not content."""
    return _HEADER.size + 4 * width * -(-(raw_bytes // width) // _SEGMENT_NUMBERS)


def decode(encoded: Buffer, out: Buffer, base: Buffer | None = None) -> None:
    """Decode into `out`, whose length is that of the block. Its content is undefined after an error.

    The memory that this takes is limited by the length of `out`. The caller compares the digest of the result.

    Raises:
        DamagedEncoding: the bytes are not an encoding of a block of that length, or its base is missing.
    """
    view = memoryview(encoded).cast("B")
    raw = np.frombuffer(out, np.uint8)
    width, with_base, raw_bytes = _header(view)
    count = raw_bytes // width
    if raw_bytes != len(raw):
        raise DamagedEncoding(f"the block has {len(raw)} bytes, and its encoding {raw_bytes}")
    earlier = None if base is None or not with_base else np.frombuffer(base, np.uint8)
    if with_base and (earlier is None or len(earlier) != raw_bytes):
        raise DamagedEncoding(f"the block is a difference, and its base of {raw_bytes} bytes is missing")
    place = header_bytes(width, raw_bytes)
    if len(view) < place:
        raise DamagedEncoding("the header is cut off")
    lengths = memoryview(view[_HEADER.size : place]).cast("I")
    if place + sum(lengths) + raw_bytes % width != len(view):
        raise DamagedEncoding("the lengths in the header do not match")
    numbers = raw[: count * width].view(f"<u{width}")
    for index, start in enumerate(range(0, count, _SEGMENT_NUMBERS)):
        segment = numbers[start : start + _SEGMENT_NUMBERS]
        planes = []
        for length in lengths[index * width : (index + 1) * width]:
            planes.append(_decompressed(view[place : place + length], len(segment)))
            place += length
        _join(planes, segment)
        if earlier is not None:
            _add(segment, earlier[: count * width].view(f"<u{width}")[start : start + _SEGMENT_NUMBERS])
    raw[count * width :] = np.frombuffer(view[place:], np.uint8)


def _header(view: memoryview) -> tuple[int, bool, int]:
    if len(view) < _HEADER.size:
        raise DamagedEncoding("the header is cut off")
    magic, width, with_base, zero, raw_bytes = _HEADER.unpack_from(view)
    if magic != _MAGIC or width not in _WIDTHS or with_base > 1 or zero:
        raise DamagedEncoding("the header is not that of byte planes")
    return width, bool(with_base), raw_bytes


def _plan(
    numbers: Numbers, base: Numbers | None, least_gain_of_base: float, compressor: NumberCompressor
) -> tuple[list[bool], bool, float]:
    """Return which planes to compress, whether as differences, and the expected number of bytes."""
    count, width = len(numbers), numbers.itemsize
    picked = _sample(count)
    compressed, expected = _shares(numbers[picked], compressor)
    uses_base = False
    if base is not None:
        with_base, expected_with_base = _shares(_differences(numbers[picked], base[picked]), compressor)
        if expected_with_base <= (1 - least_gain_of_base) * expected:
            compressed, expected, uses_base = with_base, expected_with_base, True
    return compressed, uses_base, expected * count + header_bytes(width, count * width)


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


def _segment(numbers: Numbers, base: Numbers | None, start: int) -> Numbers:
    part = slice(start, start + _SEGMENT_NUMBERS)
    return numbers[part] if base is None else _differences(numbers[part], base[part])


def _differences(numbers: Numbers, base: Numbers) -> Numbers:
    """Return the differences modulo the size of the type, with the sign as the lowest bit: 0, -1, 1, -2, …"""
    found = np.subtract(numbers, base)
    signs = found.view(f"<i{found.itemsize}") >> (8 * found.itemsize - 1)
    np.left_shift(found, 1, out=found)
    return np.bitwise_xor(found, signs.view(found.dtype), out=found)


def _add(differences: Numbers, base: Numbers) -> None:
    """Replace differences by the numbers, in place."""
    signs = np.bitwise_and(differences, 1)
    np.negative(signs, out=signs)
    np.right_shift(differences, 1, out=differences)
    np.bitwise_xor(differences, signs, out=differences)
    np.add(differences, base, out=differences)
