"""Batches of iterable datasets."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import IterableDataset

from holdfast.data.generators import GeneratorStates, LoaderGenerators
from holdfast.data.indexed import DataPosition, EpochSetter
from holdfast.data.order import preserved_random_state, seed_all, stable_hash
from holdfast.data.reachable import incomplete_state, shared_iterator
from holdfast.system.preemption import iterate_loader

_END = object()


class StreamedBatches:
    """The batches of an iterable dataset, from any position on.

    A dataset with `state_dict` and `load_state_dict` continues from its state if it is read in this process. Any
    other is read again from its start, with the same random numbers if the number of workers is the same.
    """

    order = "stream"

    def __init__(self, dataset: Any, seed: int, options: dict[str, Any], world_size: int) -> None:
        self._dataset, self._seed, self._world_size = dataset, seed, world_size
        self._stateful = hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")
        self._lacks = incomplete_state(dataset) if self._stateful else None
        self._keeps_state = self._stateful and self._lacks is None and not options.get("num_workers")
        self._watched, self.epochs = _Watched(dataset), EpochSetter(dataset, always=True)
        self.loader: torch.utils.data.DataLoader[Any] = torch.utils.data.DataLoader(
            self._watched if self._keeps_state else dataset, **options
        )
        self.collate_fn = self.loader.collate_fn
        # forked workers begin every epoch with the state of this process, which does not change
        parts = {} if self.loader.num_workers else {"dataset": dataset, "collate_fn": self.collate_fn}
        read, none = GeneratorStates(**parts), GeneratorStates()
        self.generators = LoaderGenerators(*((read, none) if self._keeps_state else (none, read)))
        self._first = dataset.state_dict() if self._keeps_state else None
        self._moved = False
        """Whether the dataset is within an epoch."""
        self.state: dict[str, Any] | None = None
        """State of the dataset to load when `batches` begins; `None` if there is none."""

    @property
    def exclusive(self) -> bool:
        """Whether a new iterator takes over from an open one: one dataset has one state; workers persist."""
        return self._keeps_state or self.loader.persistent_workers

    @property
    def extent(self) -> str:
        return f"batches of {self.loader.batch_size} from {max(self.loader.num_workers, 1)} workers"

    @property
    def limitation(self) -> str | None:
        name, workers = type(self._dataset).__name__, self.loader.num_workers
        limitations = []
        if not self._keeps_state:
            limitations.append(f"{name} is read again from its start after a resume, up to the position")
        if self._lacks is not None:
            limitations.append(f"its state_dict is not used, since it lacks {self._lacks}")
        elif self._stateful and workers:
            limitations.append("its state_dict is not used with workers: num_workers=0 would use it")
        if workers and self.loader.persistent_workers:
            limitations.append("random augmentation in persistent workers may differ")
        if self._world_size > 1:
            limitations.append(
                f"it must split itself among the {self._world_size} ranks, whose number must not change"
            )
        return "; ".join(limitations) or None

    @functools.cached_property
    def shared_iterator(self) -> str | None:
        if self._keeps_state or self.loader.num_workers:
            return None
        return shared_iterator(self._dataset)

    def pass_over(self, position: DataPosition) -> None:
        """Do nothing: an epoch is read to its end."""

    def __len__(self) -> int:
        return len(self.loader)

    def left(self, start: DataPosition) -> int:
        """Count the batches of this rank from `start` to the end of its epoch; TypeError if unknown."""
        return max(0, len(self) - start.taken)

    def leave_out(self, start: DataPosition, batches: int) -> DataPosition:
        """Return the position so many batches after `start`, which will be read and discarded.

        Raises:
            ValueError: the dataset has a state of its own, or the epoch may end before.
        """
        if self._keeps_state:
            raise ValueError(
                f"{type(self._dataset).__name__} continues from its own state, which cannot be advanced"
            )
        try:
            left = self.left(start)
        except TypeError:
            raise ValueError(
                f"{type(self._dataset).__name__} has no len(), so the end of the epoch is unknown"
            ) from None
        if batches >= left:
            raise ValueError(
                f"only {left:,} batches of its epoch are left, and a stream cannot skip past the end of an epoch"
            )
        return replace(start, taken=start.taken + batches)

    def batches(self, start: DataPosition) -> Iterator[tuple[DataPosition, Any]]:
        """Yield each batch with the position after it."""
        self.generators.begin(start.epoch, begun=start.taken > 0)
        behind = self._set_up(start)
        if self._watched.ended:
            return
        if behind == start.taken:
            self.generators.reach()
        # otherwise the seeds of workers would depend on the number of epochs in this process
        self.loader.generator.manual_seed(stable_hash(self._seed, "workers", start.epoch) >> 1)
        with preserved_random_state():
            seed_all(self._seed, "stream", start.epoch)
            source = iterate_loader(self.loader)
        for number in itertools.count(behind):
            with preserved_random_state():
                seed_all(self._seed, "stream", start.epoch, number)
                batch = next(source, _END)
            if batch is _END:
                break
            if number + 1 == start.taken:
                self.generators.reach()
            if number >= start.taken:
                yield replace(start, taken=number + 1), batch
        self._moved = False

    def state_dict(self) -> dict[str, Any] | None:
        if self.state is not None or not self._keeps_state or not self._moved:
            return self.state
        return {"own": self._dataset.state_dict(), "ended": self._watched.ended}

    def _set_up(self, start: DataPosition) -> int:
        """Prepare the dataset for `start`. Return the number of batches that it has already passed."""
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
    """Records that its end was reached, while the last batch is filled: some datasets begin again there."""

    def __init__(self, dataset: Any) -> None:
        self._dataset, self.ended = dataset, False

    def __iter__(self) -> Iterator[Any]:
        yield from self._dataset
        self.ended = True

    def __len__(self) -> int:
        return len(self._dataset)
