"""Bit-exact log of a training run by iteration, for comparison with another run."""

from __future__ import annotations

import collections
import random
import struct
from collections.abc import Mapping
from typing import Any

import numpy
import torch
import xxhash

Record = dict[str, str]
"""Digests by what they are of, after one iteration."""
Log = dict[int, Record]
"""By iteration."""


def digest(value: Any) -> str:
    """Of every bit of it: names, dtypes, shapes, and floats as they lie in memory."""
    found = xxhash.xxh3_64()
    _feed(found, value)
    return found.hexdigest()


def bits(number: float) -> str:
    return struct.pack("<d", number).hex()


def rng_record() -> Record:
    found = {
        "random state of Python": digest(random.getstate()),
        "random state of NumPy": digest(numpy.random.get_state()),
        "random state of torch": digest(torch.get_rng_state()),
    }
    if torch.cuda.is_initialized():
        found["random state of the device"] = digest(torch.cuda.get_rng_state())
    return found


def first_difference(expected: Log, seen: Log) -> str | None:
    """The first iteration that came out otherwise, and what of it."""
    for iteration in sorted(seen):
        if iteration not in expected:
            return f"iteration {iteration}: nothing to compare with"
        if different := [
            item for item, found in seen[iteration].items() if expected[iteration].get(item) != found
        ]:
            return f"iteration {iteration}: {', '.join(different)}"
    return None


def _feed(into: xxhash.xxh3_64, value: Any) -> None:
    into.update(type(value).__name__.encode())
    if isinstance(value, torch.Tensor):
        into.update(f"{value.dtype}{tuple(value.shape)}".encode())
        into.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    elif isinstance(value, numpy.ndarray):
        into.update(f"{value.dtype}{value.shape}".encode() + value.tobytes())
    elif isinstance(value, float):
        into.update(struct.pack("<d", value))
    elif isinstance(value, Mapping):
        for key, each in value.items():
            _feed(into, key)
            _feed(into, each)
    elif isinstance(value, (list, tuple, collections.deque)):
        for each in value:
            _feed(into, each)
    else:
        into.update(repr(value).encode())
