"""Random numbers that follow from what is read, not from who reads it or when."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import Dataset, Subset

from holdfast.data.order import hashed

Key = tuple[int, Any]
"""(epoch, index): what a worker needs to know to read a sample the same way as any other worker."""


class Seeded(Dataset[Any]):
    """A dataset that is read, and whose batches are collated, under random numbers of their own.

    A worker_init_fn that uses or sets attributes of `worker_info.dataset` reaches the dataset inside.
    """

    def __init__(self, dataset: Any, seed: int, collate: Callable[[Any], Any]) -> None:
        # torch's Subset has the method, too, but no wish of its own to be read so
        by_batches = hasattr(dataset, "__getitems__") and not isinstance(dataset, Subset)
        self.__dict__.update(_dataset=dataset, _seed=seed, _collate=collate, _by_batches=by_batches)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked for while it is unpickled, before there is a dataset
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)

    def __getitem__(self, key: Key) -> Any:
        with random_state_kept():
            return self._collated(key, self._read(key))

    def __getitems__(self, keys: list[Key]) -> Any:
        with random_state_kept():
            if self._by_batches:
                seed_all(self._seed, *keys[0])
                samples = list(self._dataset.__getitems__([index for _, index in keys]))
            else:
                samples = [self._read(key) for key in keys]
            return self._collated(keys[0], samples)

    def _read(self, key: Key) -> Any:
        seed_all(self._seed, *key)
        return self._dataset[key[1]]

    def _collated(self, first: Key, samples: Any) -> Any:
        seed_all(self._seed, "collate", *first)
        return self._collate(samples)


def as_it_is(batch: Any) -> Any:
    """In the place of a collate_fn, where the batch is complete already."""
    return batch


def seed_all(*parts: object) -> None:
    """Python's, torch's and, where it is in use, NumPy's global generator."""
    seed = hashed(*parts) >> 1
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed & 0xFFFF_FFFF)


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Whatever is drawn inside, the training process draws afterwards what it would have drawn anyway."""
    if torch.utils.data.get_worker_info() is not None:
        yield  # a worker's random state is nobody else's
        return
    numpy = sys.modules.get("numpy")
    state = (random.getstate(), torch.get_rng_state(), numpy.random.get_state() if numpy else None)
    try:
        yield
    finally:
        random.setstate(state[0])
        torch.set_rng_state(state[1])
        if numpy:
            numpy.random.set_state(state[2])
