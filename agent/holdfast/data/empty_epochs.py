"""Reasons for an epoch without a batch, for the error."""

from __future__ import annotations

import contextlib
from collections.abc import Sized
from typing import Any

from torch.utils.data import IterableDataset


def why_empty(loader: Any) -> str:
    """Describe why an epoch of a loader has no batch."""
    name = type(loader).__name__
    if hasattr(type(loader), "__next__"):
        return (
            f"the {name} is exhausted: it can be iterated only once. Use an iterable that restarts in every "
            "epoch, or give the number of epochs that it has"
        )
    dataset = getattr(loader, "dataset", None)
    if dataset is None:
        return f"the {name} gave none"
    kind, size = type(dataset).__name__, None
    if isinstance(dataset, Sized):
        with contextlib.suppress(Exception):  # a dataset of the script may raise anything
            size = len(dataset)
    whole = (loader.batch_size or 1) * getattr(loader, "world_size", 1)
    if size == 0:
        return f"the {kind} of the {name} is empty"
    if isinstance(dataset, IterableDataset):
        return f"the {kind} of the {name} gave no sample, or fewer than a batch with drop_last=True"
    if size is not None and loader.drop_last and size < whole:
        dropped = f"drop_last=True drops a batch of fewer than {whole:,}"
        return f"the {kind} of the {name} has {size:,} samples, and {dropped}"
    sampler = loader.batch_sampler if loader.batch_size is None else loader.sampler
    return f"the {type(sampler).__name__} of the {name} gave no index"
