"""The order that a sampler gives, read as it is needed."""

from __future__ import annotations

import functools
import itertools
import logging
import random
import sys
import time
from collections.abc import Iterable, Iterator, Sized
from typing import Any

import torch

from holdfast.data.generators import GeneratorStates
from holdfast.data.indexed import EpochSetter
from holdfast.data.order import RankShare, preserved_random_state, seed_all
from holdfast.data.reachable import shared_iterator

logger = logging.getLogger("holdfast")

FIRST_BLOCK, LARGEST_BLOCK = 16, 1024
"""Items read at once. Each block is twice as large as the one before: a switch of random states takes 60 µs."""
SLOW_SECONDS = 2.0
"""A resume that takes longer to get through a sampler is reported."""


class SampledOrder:
    """The order of one epoch. The sampler is iterated with random generators that are seeded from the epoch.

    The blocks begin at the same places for any start, so that a sampler with its own generator has drawn equally
    much from it after a resume.
    """

    def __init__(self, source: Iterable[Any], seed: int, epoch: int) -> None:
        self._name = type(source).__name__
        with preserved_random_state():
            seed_all(seed, "order", epoch)
            self._items = iter(source)
            self._states = _states()
        self._block: list[Any] = []
        self._first: list[Any] = []
        """The first block, from which the order is padded."""
        self._next_size, self._read = FIRST_BLOCK, 0
        self._ended = False

    @property
    def size(self) -> int:
        """Number of items, as soon as the last one has been read."""
        return self._read if self._ended else sys.maxsize

    def begin(self, start: int) -> None:
        """Read up to a place, which takes time where it is far."""
        began = time.perf_counter()
        self._read_to(start)
        if start and (seconds := time.perf_counter() - began) > SLOW_SECONDS:
            logger.warning(
                "%s gives its order one by one: the resume took %.0f s to get through the %s items before the "
                "position",
                *(self._name, seconds, format(start, ",")),
            )

    def items(self, start: int, share: RankShare) -> Iterator[Any]:
        """Yield one rank's items from `start`, as `RankShare.places` gives them for an order of known size."""
        world_size, items = share.world_size, self._from(start)
        if world_size == 1:
            yield from items
            return
        together = share.batch_size * world_size if share.tail == "drop" else world_size
        while whole := list(itertools.islice(items, together)):
            if len(whole) < together:
                if share.tail == "drop":
                    return
                if share.tail == "pad":
                    whole += itertools.islice(itertools.cycle(self._first), -len(whole) % world_size)
            yield from whole[share.rank :: world_size]

    def pass_over(self) -> None:
        """Read to the end, so that a generator of the sampler is where the epoch leaves it."""
        self._read_to(sys.maxsize)

    def _from(self, place: int) -> Iterator[Any]:
        while True:
            self._read_to(place)
            rest = self._block[max(0, place - self._read + len(self._block)) :]
            if not rest:
                return
            yield from rest[:-1]
            place += len(rest)
            self._read_to(place)  # one block ahead: the end is known when the last item is given
            yield rest[-1]

    def _read_to(self, place: int) -> None:
        """Read blocks until the one that has this place."""
        if self._ended or place < self._read:
            return
        with preserved_random_state():
            _set_states(self._states)
            while not self._ended and place >= self._read:
                block = list(itertools.islice(self._items, self._next_size))
                self._ended = len(block) < self._next_size
                if block:
                    self._block, self._read = block, self._read + len(block)
                    self._first = self._first or block
                self._next_size = min(2 * self._next_size, LARGEST_BLOCK)
            self._states = _states()


def _states() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy")
    return random.getstate(), torch.get_rng_state(), numpy.random.get_state(legacy=False) if numpy else None


def _set_states(states: tuple[Any, ...]) -> None:
    random.setstate(states[0])
    torch.set_rng_state(states[1])
    if states[2] is not None and (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.set_state(states[2])


class SamplerOrder:
    """The order given by a sampler or a batch sampler."""

    def __init__(self, source: Iterable[Any], seed: int) -> None:
        self._source, self._seed = source, seed
        self._parts: tuple[Any, ...] = (source, getattr(source, "sampler", None))
        self.name, self.epochs = type(source).__name__, EpochSetter(*self._parts)
        sharing = (part for part in self._parts if hasattr(part, "num_replicas") and hasattr(part, "rank"))
        self.shards = int(getattr(next(sharing, None), "num_replicas", 1))
        """Number of ranks among which the order itself is split; it then gives one rank's part."""

    @property
    def size(self) -> int | None:
        """Items per epoch; `None` if unknown in advance."""
        return len(self._source) if isinstance(self._source, Sized) else None

    @property
    def limitation(self) -> str | None:
        """Guarantees that this order cannot give, as text."""
        if self.shards > 1:
            return (
                f"{self.name} splits samples among {self.shards} ranks: with another number of ranks some may "
                "occur twice or not at all. Remove it: holdfast.DataLoader splits them for any number of ranks"
            )
        return None

    @functools.cached_property
    def shared_iterator(self) -> str | None:
        return shared_iterator(self._source)

    @property
    def generators(self) -> GeneratorStates:
        return GeneratorStates(sampler=self._source)

    def draw(self, epoch: int) -> SampledOrder:
        """Iterate the sampler with generators seeded from the epoch, so that its order is reproducible."""
        return SampledOrder(self._source, self._seed, epoch)
