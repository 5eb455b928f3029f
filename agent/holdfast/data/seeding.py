"""Random numbers that depend on the sample that is read, not on the worker or the time."""

from __future__ import annotations

import ctypes
import logging
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.utils.data import Dataset, Subset

from holdfast.data.order import stable_hash

logger = logging.getLogger("holdfast")

_MT19937_BYTES = 625 * 4
"""624 numbers, and the place of the next one."""
Key = tuple[int, Any]
"""(epoch, index): all that a worker needs to read a sample like any other worker."""


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
        super().__init__(dataset, _seed=seed, _collate=collate, _by_batches=by_batches)

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
        seed_all(self._seed, *key)
        return self._dataset[key[1]]

    def _collated(self, first: Key, samples: Any) -> Any:
        seed_all(self._seed, "collate", *first)
        return self._collate(samples)


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
    get_numpy_state, set_numpy_state = _numpy_state() if "numpy" in sys.modules else (_nothing, _nothing)
    python, of_torch, of_numpy = random.getstate(), torch.get_rng_state(), get_numpy_state()
    try:
        yield
    finally:
        random.setstate(python)
        torch.set_rng_state(of_torch)
        set_numpy_state(of_numpy)


def _nothing(*_: Any) -> None:
    pass


@cache
def _numpy_state() -> tuple[Callable[[], Any], Callable[[Any], None]]:
    """Return functions that get and set the state of NumPy's global generator.

    Its own take 0.35 ms together for each batch, because they copy the 624 numbers of MT19937 one by one. Copying
    their memory takes 0.01 ms. The layout of this memory is checked here; where it is another one, NumPy's own
    functions are used.
    """
    import numpy

    before = numpy.random.get_state(legacy=False)
    try:
        fast = _FastNumpyState()
        state = fast.get()
        numpy.random.seed(1)
        numpy.random.standard_normal()  # leaves a second number, which is a part of the state
        fast.set(state)
        if _same_state(before, numpy.random.get_state(legacy=False)):
            return fast.get, fast.set
    except Exception as error:  # private parts of NumPy may be missing in another version
        logger.debug("the state of NumPy's generator is copied by NumPy: %s", error)
    numpy.random.set_state(before)
    return numpy.random.get_state, numpy.random.set_state


def _same_state(one: Any, other: Any) -> bool:
    pairs = [(each["state"]["key"].tobytes(), each["state"]["pos"]) for each in (one, other)]
    return pairs[0] == pairs[1] and all(one[name] == other[name] for name in ("has_gauss", "gauss"))


class _FastNumpyState:
    """Gets and sets the state of NumPy's global generator by copying its memory."""

    def __init__(self) -> None:
        import numpy

        class OnlyGauss(numpy.random.MT19937):
            """Stands for the bit generator while NumPy gets or sets the rest of the state, a normal number."""

            @property
            def state(self) -> Any:
                return {"bit_generator": "MT19937", "state": None}

            @state.setter
            def state(self, _: Any) -> None:
                pass

        self._numpy, self._only_gauss = numpy.random, OnlyGauss(0)
        self._global: Any = numpy.random.mtrand._rand

    def get(self) -> Any:
        bits = self._global._bit_generator
        if type(bits) is not self._numpy.MT19937:  # the script has replaced it
            return self._numpy.get_state(legacy=False)
        memory = ctypes.string_at(bits.ctypes.state_address, _MT19937_BYTES)
        self._global._bit_generator = self._only_gauss
        try:
            return bits, memory, self._global.get_state(legacy=False)
        finally:
            self._global._bit_generator = bits

    def set(self, state: Any) -> None:
        if isinstance(state, dict):
            self._numpy.set_state(state)
            return
        bits, memory, gauss = state
        ctypes.memmove(bits.ctypes.state_address, memory, _MT19937_BYTES)
        self._global._bit_generator = self._only_gauss
        try:
            self._global.set_state(gauss)
        finally:
            self._global._bit_generator = bits
