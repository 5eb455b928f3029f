"""Iterable datasets: no index to ask for, only more of the same."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import IterableDataset

from holdfast.data.indexed import Epochs, Position
from holdfast.data.order import hashed
from holdfast.data.seeding import random_state_kept, seed_all
from holdfast.system.preemption import begun

_END = object()


class Streamed:
    """The batches of an iterable dataset, from any position on.

    A dataset with `state_dict` and `load_state_dict` goes on by itself where it is read in this process. Any
    other is read again from its start: under the same random numbers, if as many workers read it.
    """

    order = "stream"

    def __init__(self, dataset: Any, seed: int, options: dict[str, Any], world_size: int) -> None:
        self._dataset, self._seed, self._world_size = dataset, seed, world_size
        self._stateful = hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")
        self._keeps_state = self._stateful and not options.get("num_workers")
        self._watched, self.epochs = _Watched(dataset), Epochs(dataset, always=True)
        self.loader: torch.utils.data.DataLoader[Any] = torch.utils.data.DataLoader(
            self._watched if self._keeps_state else dataset, **options
        )
        self.collate_fn = self.loader.collate_fn
        self._first = dataset.state_dict() if self._keeps_state else None
        self._moved = False
        """The dataset is somewhere within an epoch."""
        self.state: dict[str, Any] | None = None
        """What `state_dict` gave, for when `batches` is asked for the position that it belongs to."""

    @property
    def exclusive(self) -> bool:
        """A new iterator takes over from an open one: the dataset is in one place, or the workers persist."""
        return self._keeps_state or self.loader.persistent_workers

    @property
    def extent(self) -> str:
        return f"batches of {self.loader.batch_size} from {max(self.loader.num_workers, 1)} workers"

    @property
    def gap(self) -> str | None:
        name, workers = type(self._dataset).__name__, self.loader.num_workers
        gaps = []
        if not self._keeps_state:
            gaps.append(f"{name} is read again from its start after a resume, up to where training stood")
        if self._stateful and workers:
            gaps.append("its own state stays in the workers: num_workers=0 would use it")
        if workers and self.loader.persistent_workers:
            gaps.append("random augmentation in persistent workers may differ")
        if self._world_size > 1:
            gaps.append(f"it must share itself among the {self._world_size} ranks, and stay with that number")
        return "; ".join(gaps) or None

    def __len__(self) -> int:
        return len(self.loader)

    def left(self, start: Position) -> int:
        """Batches of this rank from `start` to the end of its epoch; TypeError where that cannot be known."""
        return max(0, len(self) - start.taken)

    def batches(self, start: Position) -> Iterator[tuple[Position, Any]]:
        """Each with the position after it."""
        behind = self._set_up(start)
        if self._watched.ended:
            return
        # or workers would be seeded by how many epochs this process has seen
        self.loader.generator.manual_seed(hashed(self._seed, "workers", start.epoch) >> 1)
        with random_state_kept():
            seed_all(self._seed, "stream", start.epoch)
            source = begun(self.loader)
        for number in itertools.count(behind):
            with random_state_kept():
                seed_all(self._seed, "stream", start.epoch, number)
                batch = next(source, _END)
            if batch is _END:
                break
            if number >= start.taken:
                yield replace(start, taken=number + 1), batch
        self._moved = False

    def state_dict(self) -> dict[str, Any] | None:
        if self.state is not None or not self._keeps_state or not self._moved:
            return self.state
        return {"own": self._dataset.state_dict(), "ended": self._watched.ended}

    def _set_up(self, start: Position) -> int:
        """Make the dataset ready for `start`; how many batches are behind it then."""
        state, self.state = self.state, None
        self._watched.ended = False
        if not self._keeps_state:
            return 0
        if state is not None:
            self._dataset.load_state_dict(state["own"])
            self._watched.ended = state["ended"]
        elif self._moved:
            self._dataset.load_state_dict(self._first)
        self._moved = not self._watched.ended
        return start.taken if state is not None else 0


class _Watched(IterableDataset[Any]):
    """Knows whether its end was met, as it is while a last batch is filled: some datasets begin again there."""

    def __init__(self, dataset: Any) -> None:
        self._dataset, self.ended = dataset, False

    def __iter__(self) -> Iterator[Any]:
        yield from self._dataset
        self.ended = True

    def __len__(self) -> int:
        return len(self._dataset)
