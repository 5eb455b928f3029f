"""The order of samples and each rank's share of it: functions of a few numbers, of which nothing is kept."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

Tail = Literal["pad", "short", "drop"]
BLOCK = 4096
"""Places of a permutation that are worked out at once: half a microsecond each, where one alone takes 700."""
ROUNDS = 16
"""With 10, some orders of five or six samples are measurably likelier than others."""


def hashed(*parts: object, size_bytes: int = 8) -> int:
    """A number from a few small values; nearby ones give unrelated results."""
    text = "/".join(str(part) for part in parts).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=size_bytes).digest(), "little")


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one rank takes of a global order, wherever the epoch goes on.

    An iteration takes the next `batch_size` × `world_size` places, dealt to the ranks in turn. So the ranks
    have always used up a beginning of the order together, and any other number of them can go on from there.
    """

    rank: int = 0
    world_size: int = 1
    batch_size: int = 1
    tail: Tail = "pad"
    """When less is left than a whole iteration takes: "pad" gives every rank equally many, by beginning again
    with the order's first places; "short" gives some ranks one less, or none; "drop" gives none."""

    def places(self, start: int, size: int) -> range:
        """The places of this rank from `start` on, in an order of `size`; those past its end are padding."""
        return range(start + self.rank, self._end(start, size), self.world_size)

    def iterations(self, start: int, size: int) -> int:
        """How often this rank gets a batch."""
        return math.ceil(len(self.places(start, size)) / self.batch_size)

    def after(self, start: int, iterations: int, size: int) -> tuple[int, int]:
        """The place where all ranks stand so many iterations after `start`, and the padding given on the way."""
        place = min(start + iterations * self.batch_size * self.world_size, self._end(start, size))
        return min(place, size), max(place - size, 0)

    def _end(self, start: int, size: int) -> int:
        left = max(size - start, 0)
        if self.tail == "drop":
            left -= left % (self.batch_size * self.world_size)
        elif self.tail == "pad":
            left += -left % self.world_size
        return start + left


class Permutation:
    """Each of 0 … size - 1 once, in an order that follows from a key; any place of it is found by itself.

    A Feistel network over a rectangle of just over `size` cells, whose results past the end go through it again
    (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). A checkpoint's position is a place in this
    order: it must never change.
    """

    def __init__(self, size: int, *key: object) -> None:
        self.size = size
        self._width = math.isqrt(max(size - 1, 0)) + 1
        self._height = -(-size // self._width)
        keys = hashed("order", *key, size_bytes=4 * ROUNDS)
        self._keys = [keys >> 32 * i & 0xFFFF_FFFF for i in range(ROUNDS)]

    def at(self, places: range) -> Iterator[int]:
        """What stands at these places, counted round from the end to the beginning."""
        for first in range(0, len(places), BLOCK):
            block = places[first : first + BLOCK]
            cells = torch.arange(block.start, block.stop, block.step, dtype=torch.int64, device="cpu")
            yield from self._permuted(cells % self.size).tolist()

    def _permuted(self, cells: torch.Tensor) -> torch.Tensor:
        cells = self._encrypted(cells)
        while bool((outside := cells >= self.size).any()):
            cells[outside] = self._encrypted(cells[outside])
        return cells

    def _encrypted(self, cells: torch.Tensor) -> torch.Tensor:
        columns, rows = cells % self._width, cells // self._width
        for i, key in enumerate(self._keys):
            if i % 2:
                rows = (rows + _scattered(columns ^ key)) % self._height
            else:
                columns = (columns + _scattered(rows ^ key)) % self._width
        return columns + rows * self._width


def _scattered(numbers: torch.Tensor) -> torch.Tensor:
    """32 bits each; factors of 31 bits, so that no product overflows."""
    numbers = (numbers ^ numbers >> 16) * 0x7FEB352D & 0xFFFF_FFFF
    numbers = (numbers ^ numbers >> 15) * 0x045D9F3B & 0xFFFF_FFFF
    return numbers ^ numbers >> 16
