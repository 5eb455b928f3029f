"""Digests of batches, to compare what a loader gives before and after a resume."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

FIRST_BYTES = 16384
VALUES = 64
"""Number of values of a larger tensor to digest after its first bytes: all would take as long as reading them."""
MOST_LEAVES = 32


def digest_of(batch: Any, least_bytes: int = 0) -> str | None:
    """Return a digest of the shapes, and of some values in host memory.

    `None` for a batch of other objects, or of fewer bytes: equal digests of a few values prove little.
    """
    digest, size = hashlib.blake2b(digest_size=8), 0
    try:
        for leaf in itertools.islice(_leaves(batch), MOST_LEAVES):
            digest.update(leaf)
            size += len(leaf)
    except Exception:  # a batch may be of any class
        return None
    return digest.hexdigest() if size > least_bytes else None


def _leaves(value: Any) -> Iterator[bytes]:
    if isinstance(value, torch.Tensor):
        yield f"{value.dtype}{tuple(value.shape)}".encode()
        yield _some_of(value)
    elif isinstance(value, (bool, int, float, complex, str, bytes)):
        yield repr(value).encode()
    elif isinstance(value, Mapping):
        for key in value:
            yield from _leaves(value[key])
    elif isinstance(value, (list, tuple)):
        for item in value[:MOST_LEAVES]:
            yield from _leaves(item)
    elif hasattr(value, "__array_interface__"):  # NumPy
        yield from _leaves(torch.from_numpy(value))
    elif dataclasses.is_dataclass(value):
        yield from _leaves([getattr(value, each.name) for each in dataclasses.fields(value)])


def _some_of(tensor: torch.Tensor) -> bytes:
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or not tensor.is_contiguous():
        return b""
    values = tensor.detach().view(-1)
    first = values[: FIRST_BYTES // values.element_size()]
    spread = values[:: max(1, len(values) // VALUES)] if len(first) < len(values) else values[:0]
    return b"".join(each.contiguous().view(torch.uint8).numpy().tobytes() for each in (first, spread))
