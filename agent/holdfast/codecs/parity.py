"""An erasure code over rows of bytes: with up to three parity rows, as many lost rows can be recomputed.

Parity row `p` is the sum of `data[i] * 2**(p * i)` over the data rows, in the field GF(2**8) with the polynomial
0x11d: the first is the XOR of all rows. Any three such rows are independent for up to 255 data rows. Doubling
works on eight bytes at a time, so that encoding needs no table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

_REDUCTION = 0x1D
_LOW_BITS = np.uint64(0x7F7F7F7F7F7F7F7F)
_ONES = np.uint64(0x0101010101010101)
_WORD_BYTES = 8

Row = Any
"""A buffer of bytes, or None for a lost row."""
Words = np.ndarray[Any, np.dtype[np.uint64]]


class TooManyLost(ValueError):
    """More rows are lost than there are parity rows."""


def encode(data: Sequence[Row], parity_rows: int, row_bytes: int) -> list[memoryview]:
    """Return the parity rows of `data`.

    Args:
        data: the rows, in their order. A shorter row is continued, and a lost one replaced, by zeros.
        parity_rows: how many to compute, at most 3.
        row_bytes: length of a row, a multiple of 8.
    """
    words = [_words(row, row_bytes) for row in data]
    carry = np.empty(row_bytes // _WORD_BYTES, np.uint64)
    found = []
    for power in range(parity_rows):
        total = np.zeros_like(carry)
        for row in reversed(words):  # Horner's method
            for _ in range(power):
                _double(total, carry)
            if row is not None:
                np.bitwise_xor(total, row, out=total)
        found.append(total.data.cast("B"))
    return found


def recover(data: Sequence[Row], parity: Sequence[Row], row_bytes: int) -> dict[int, memoryview]:
    """Return the lost rows of `data` by their index.

    Args:
        data: the rows, None for those that are lost.
        parity: the parity rows, None for those that are lost.
        row_bytes: length of a row, a multiple of 8. The rows that are returned have this length.

    Raises:
        TooManyLost: more data rows are lost than parity rows are left.
    """
    lost = [index for index, row in enumerate(data) if row is None]
    left = [power for power, row in enumerate(parity) if row is not None]
    if len(lost) > len(left):
        raise TooManyLost(f"{len(lost)} rows are lost, and {len(left)} parity rows are left")
    if not lost:
        return {}
    used = left[: len(lost)]
    of_rest = encode(data, used[-1] + 1, row_bytes)
    sums = [_words(parity[power], row_bytes) ^ np.frombuffer(of_rest[power], np.uint64) for power in used]
    inverse = _inverted([[_EXP[power * index % 255] for index in lost] for power in used])
    found = {}
    for index, factors in zip(lost, inverse, strict=True):
        total = np.zeros(row_bytes, np.uint8)
        for factor, each in zip(factors, sums, strict=True):
            total ^= _times(factor)[each.view(np.uint8)]
        found[index] = total.data
    return found


def _double(words: Words, carry: Words) -> None:
    """Multiply every byte by 2; `carry` is memory to work in."""
    np.right_shift(words, np.uint64(7), out=carry)
    np.bitwise_and(carry, _ONES, out=carry)
    np.multiply(carry, np.uint64(_REDUCTION), out=carry)
    np.bitwise_and(words, _LOW_BITS, out=words)
    np.left_shift(words, np.uint64(1), out=words)
    np.bitwise_xor(words, carry, out=words)


def _words(row: Row, row_bytes: int) -> Any:
    """Return a row as words, continued by zeros; None for a lost row."""
    if row is None or len(row) == row_bytes:
        return None if row is None else np.frombuffer(row, np.uint64)
    padded = np.zeros(row_bytes, np.uint8)
    padded[: len(row)] = np.frombuffer(row, np.uint8)
    return padded.view(np.uint64)


def _powers() -> tuple[list[int], list[int]]:
    """Return 2**n by n, and n by 2**n."""
    exp, log, value = [0] * 255, [0] * 256, 1
    for power in range(255):
        exp[power], log[value] = value, power
        value = value << 1 ^ (0x100 | _REDUCTION if value & 0x80 else 0)
    return exp, log


_EXP, _LOG = _powers()


def _product(a: int, b: int) -> int:
    return _EXP[(_LOG[a] + _LOG[b]) % 255] if a and b else 0


def _times(factor: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the product of every byte with a factor."""
    return np.array([_product(factor, byte) for byte in range(256)], np.uint8)


def _inverted(matrix: list[list[int]]) -> list[list[int]]:
    """Return the inverse of a small regular matrix, by Gauss-Jordan elimination."""
    size = len(matrix)
    rows = [[*row, *(int(column == number) for column in range(size))] for number, row in enumerate(matrix)]
    for column in range(size):
        pivot = next(number for number in range(column, size) if rows[number][column])
        rows[column], rows[pivot] = rows[pivot], rows[column]
        scale = _EXP[-_LOG[rows[column][column]] % 255]
        rows[column] = [_product(scale, value) for value in rows[column]]
        for number in range(size):
            if number != column and (factor := rows[number][column]):
                rows[number] = [
                    value ^ _product(factor, above)
                    for value, above in zip(rows[number], rows[column], strict=True)
                ]
    return [row[size:] for row in rows]
