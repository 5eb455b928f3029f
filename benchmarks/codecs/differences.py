"""Byte planes of the differences from an earlier state, as integers: small numbers where the two are close.

The sign is the lowest bit: 0, -1, 1, -2, … An encoded block begins with a byte that says whether it has a base.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from holdfast.codecs import planes

LEAST_GAIN_OF_BASE = 0.05
"""Share of the bytes without a base that a base must save."""
Numbers = np.ndarray[Any, Any]


def encode(data: Any, width: int, base: Any, least_gain_of_base: float = LEAST_GAIN_OF_BASE) -> bytes | None:
    """Return `data` as byte planes, of the differences if they are smaller; None if neither saves 10 %."""
    alone = planes.encode(data, width)
    found = planes.encode(_differences(_numbers(data, width), _numbers(base, width)).view(np.uint8), width)
    if found is not None and len(found) <= (1 - least_gain_of_base) * (len(data) if alone is None else len(alone)):
        return b"\1" + found
    return None if alone is None else b"\0" + alone


def needs_base(encoded: Any) -> bool:
    return bytes(encoded[:1]) == b"\1"


def decode(encoded: Any, out: Any, base: Any) -> None:
    """Decode into `out`."""
    planes.decode(memoryview(encoded)[1:], out)
    if needs_base(encoded):
        raw = np.frombuffer(out, np.uint8)
        width = memoryview(encoded)[5]
        _add(raw.view(f"<u{width}"), _numbers(base, width))


def _numbers(data: Any, width: int) -> Numbers:
    return np.frombuffer(data, np.uint8).view(f"<u{width}")


def _differences(numbers: Numbers, base: Numbers) -> Numbers:
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
