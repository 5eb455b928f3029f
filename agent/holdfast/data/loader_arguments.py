"""Arguments of `holdfast.DataLoader`: checks, and those that correspond to a loader of torch."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, SequentialSampler

from holdfast.distributed.ranks import rank_and_world_size

_OPTIONS = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"),
    *("prefetch_factor", "persistent_workers", "pin_memory_device", "in_order"),
)


def arguments_of(loader: torch.utils.data.DataLoader[Any]) -> dict[str, Any]:
    """Return the arguments with which `holdfast.DataLoader` gives the same batches as a loader of torch.

    Shuffled ones come in another order, and a sampler of the script's own is kept.

    Raises:
        TypeError: it is no loader of torch, or of a class that iterates in its own way.
    """
    kind = type(loader)
    if not isinstance(loader, torch.utils.data.DataLoader):
        raise TypeError(f"DataLoader.from_torch: {kind.__name__} is not a torch.utils.data.DataLoader")
    if kind.__iter__ is not torch.utils.data.DataLoader.__iter__:
        raise TypeError(
            f"DataLoader.from_torch: {kind.__name__} has its own __iter__; create a holdfast.DataLoader"
        )
    given: dict[str, Any] = {name: getattr(loader, name) for name in _OPTIONS if hasattr(loader, name)}
    given["dataset"] = loader.dataset
    if loader.generator is not None:
        given["seed"] = loader.generator.initial_seed()
    if isinstance(loader.dataset, IterableDataset):
        return given | {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    batches: Any = loader.batch_sampler
    if batches is not None and type(batches) is not BatchSampler:
        return given | {"batch_sampler": batches}
    if batches is not None:
        sampler = batches.sampler
        given |= {"batch_size": batches.batch_size, "drop_last": batches.drop_last}
    else:
        sampler = loader.sampler
        given["batch_size"] = None
    return given | _order(sampler, len(loader.dataset))  # type: ignore[arg-type]


def _order(sampler: Any, samples: int) -> dict[str, Any]:
    if type(sampler) is SequentialSampler and len(sampler) == samples:
        return {}
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == samples:
        return {"shuffle": True}
    return {"sampler": sampler}


def refuse(
    options: dict[str, Any],
    shuffle: bool,
    sampler: object,
    batch_sampler: object,
    drop_last: bool,
    batch_size: int | None,
) -> None:
    """Raise ValueError for arguments that exclude each other."""
    if options.pop("generator", None) is not None:
        raise ValueError("DataLoader(generator=...): the order follows from seed; give seed=... instead")
    if not options.get("in_order", True):
        raise ValueError("DataLoader(in_order=False): batches in order of arrival have no position; drop it")
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"DataLoader(batch_size={batch_size}): give at least 1, or None for single samples")
    if sampler is not None and shuffle:
        raise ValueError("DataLoader(sampler=..., shuffle=True): the sampler decides the order; drop shuffle")
    if batch_sampler is not None and (sampler is not None or shuffle or drop_last or batch_size != 1):
        raise ValueError(
            "DataLoader(batch_sampler=...) replaces batch_size, shuffle, sampler and drop_last; drop them"
        )


def place_among_ranks(rank: int | None, world_size: int | None) -> tuple[int, int]:
    if rank is None and world_size is None:
        return rank_and_world_size()
    if rank is None or world_size is None or not 0 <= rank < world_size:
        raise ValueError(f"DataLoader(rank={rank}, world_size={world_size}): give both, 0 <= rank < world_size")
    return rank, world_size
