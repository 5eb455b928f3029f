"""The order of samples, each rank's share of it, and the random numbers of a sample: functions of a few numbers.

The random numbers depend on the sample that is read, not on the worker or the time.
"""

from __future__ import annotations

import functools
import hashlib
import math
import operator
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils.data import Dataset, Subset

Key = tuple[int, Any]
"""(epoch, index): all that a worker needs to read a sample like any other worker."""
Tail = Literal["pad", "short", "drop"]
BLOCK = 4096
"""Places of a permutation computed at once: half a microsecond each, instead of 700 for a single one."""
ROUNDS = 16
"""Rounds of the cipher. With 10, some orders of five or six samples are measurably more likely."""


def stable_hash(*parts: object, size_bytes: int = 8) -> int:
    """Hash a few small values to a number."""
    text = "/".join(str(part) for part in parts).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=size_bytes).digest(), "little")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShare:
    """One rank's share of a global order.

    An iteration takes the next `batch_size` × `world_size` places, dealt to the ranks in turn. So all ranks
    together have always used a prefix of the order, and any number of ranks can continue from its end.
    """

    rank: int = 0
    world_size: int = 1
    batch_size: int = 1
    tail: Tail = "pad"
    """Handling of a last, incomplete iteration: "pad" gives every rank equally many, by repeating the first places
    of the order; "short" gives some ranks one fewer or none; "drop" gives none."""

    def places(self, start: int, size: int) -> range:
        """Return the places of this rank from `start` in an order of `size`; those past its end are padding."""
        return range(start + self.rank, self._end(start, size), self.world_size)

    def iterations(self, start: int, size: int) -> int:
        """Count the batches of this rank."""
        return math.ceil(len(self.places(start, size)) / self.batch_size)

    def after(self, start: int, iterations: int, size: int) -> tuple[int, int]:
        """Return the place of all ranks so many iterations after `start`, and the padding given by then."""
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
    """A permutation of 0 … size - 1 that follows from a key. Each place is computed independently.

    It is a Feistel network over a rectangle of just over `size` cells, with cycle walking (Black and Rogaway,
    "Ciphers with arbitrary finite domains", 2002). The positions of checkpoints are places in this order, so it
    must never change.
    """

    def __init__(self, size: int, *key: object) -> None:
        self.size = size
        self._width = math.isqrt(max(size - 1, 0)) + 1
        self._height = -(-size // self._width)
        keys = stable_hash("order", *key, size_bytes=4 * ROUNDS)
        self._keys = [keys >> 32 * i & 0xFFFF_FFFF for i in range(ROUNDS)]

    def at(self, places: range) -> Iterator[int]:
        """Yield the numbers at these places, modulo the size."""
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
    """Mix the 32 bits of each number. Factors of 31 bits prevent overflow."""
    numbers = (numbers ^ numbers >> 16) * 0x7FEB352D & 0xFFFF_FFFF
    numbers = (numbers ^ numbers >> 15) * 0x045D9F3B & 0xFFFF_FFFF
    return numbers ^ numbers >> 16


class DatasetWrapper(Dataset[Any]):
    """A wrapper through which a worker_init_fn reads and sets attributes of the dataset inside."""

    def __init__(self, dataset: Any, **own: Any) -> None:
        self.__dict__.update(own, _dataset=dataset)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # requested during unpickling, before there is a dataset
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)


class SeededDataset(DatasetWrapper):
    """A dataset that seeds the random generators before each sample is read and each batch collated."""

    def __init__(self, dataset: Any, seed: int, collate: Callable[[Any], Any]) -> None:
        # torch's Subset has the method as well, but reads single samples
        by_batches = hasattr(dataset, "__getitems__") and not isinstance(dataset, Subset)
        super().__init__(dataset, _seed=seed, _collate=collate, _by_batches=by_batches, _draws={})

    @property
    def draws_nothing(self) -> bool:
        """Whether this process has read and collated samples, the first of which drew no random number."""
        return len(self._draws) == 2 and not any(self._draws.values())

    def __getitem__(self, key: Key) -> Any:
        with preserved_random_state():
            return self._collated(key, self._read(key))

    def __getitems__(self, keys: list[Key]) -> Any:
        with preserved_random_state():
            if self._by_batches:
                seed_all(self._seed, *keys[0])
                samples = list(self._dataset.__getitems__([index for _, index in keys]))
            else:
                samples = [self._read(key) for key in keys]
            return self._collated(keys[0], samples)

    def _read(self, key: Key) -> Any:
        return self._run("read", key, operator.itemgetter(key[1]), self._dataset)

    def _collated(self, first: Key, samples: Any) -> Any:
        return self._run("collate", ("collate", *first), self._collate, samples)

    def _run(self, kind: str, parts: tuple[Any, ...], function: Callable[[Any], Any], argument: Any) -> Any:
        seed_all(self._seed, *parts)
        result = function(argument)
        if kind not in self._draws:
            drawn = _next_numbers()
            seed_all(self._seed, *parts)
            self._draws[kind] = drawn != _next_numbers()
        return result


def _next_numbers() -> tuple[float, ...]:
    """Draw a number from each generator that `seed_all` seeds."""
    numpy = sys.modules.get("numpy")
    numbers = random.random(), torch.rand((), device="cpu").item()  # noqa: S311
    return numbers if numpy is None else (*numbers, numpy.random.random())


def unchanged_batch(batch: Any) -> Any:
    """Return the batch unchanged: a collate_fn for batches that are complete."""
    return batch


def seed_all(*parts: object) -> None:
    """Seed the global generators of Python and torch, and that of NumPy if it is in use."""
    seed = stable_hash(*parts) >> 1
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed & 0xFFFF_FFFF)


@contextmanager
def preserved_random_state() -> Iterator[None]:
    """Restore the random state of the training process afterwards."""
    if torch.utils.data.get_worker_info() is not None:
        yield  # the state of a worker does not matter
        return
    python_state, torch_state = random.getstate(), torch.get_rng_state()
    numpy = sys.modules.get("numpy")
    if numpy:
        generator, numpy_state = numpy.random.get_bit_generator(), numpy.random.get_state(legacy=False)
        numpy.random.set_bit_generator(_sample_generator())  # writing a state back would take 25 µs
    try:
        yield
    finally:
        random.setstate(python_state)
        torch.set_rng_state(torch_state)
        if numpy:
            numpy.random.set_bit_generator(generator)
            # NumPy keeps the second of two normals outside the generator; and nested calls share one generator
            if numpy_state["has_gauss"] or generator is _sample_generator():
                numpy.random.set_state(numpy_state)


@functools.cache
def _sample_generator() -> Any:
    """The generator of NumPy's global functions while a sample is read."""
    import numpy

    return numpy.random.MT19937()
