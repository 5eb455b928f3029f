"""Batches of map-style datasets: the order of indices, each rank's share, and the position."""

from __future__ import annotations

import itertools
import logging
import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import BatchSampler, Dataset, Sampler

from holdfast.data.generators import GeneratorStates, LoaderGenerators
from holdfast.data.order import Key, Permutation, RankShare, SeededDataset, unchanged_batch
from holdfast.system.preemption import iterate_loader

if TYPE_CHECKING:
    from holdfast.data.sampled import SamplerOrder

logger = logging.getLogger("holdfast")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPosition:
    """Position of training in its data: what finished iterations have taken of `epoch` (from 0).

    Counted in samples on all ranks together; with a batch_sampler, in batches on all ranks together; for an
    iterable dataset, in batches of this rank.
    """

    epoch: int = 0
    taken: int = 0
    padded: int = 0
    """Samples given twice in all epochs so far, so that every rank got equally many."""


class EpochSetter:
    """Calls `set_epoch` of samplers or of a dataset.

    Their attribute `epoch` shows whether the script has set the epoch, which is then left as it is.

    Args:
        always: also call it for the script's own loop, which with torch's loader would call it itself.
    """

    def __init__(self, *parts: Any, always: bool = False) -> None:
        self._parts = [part for part in parts if hasattr(part, "set_epoch")]
        self._always = always
        self.in_use: int | None = None
        """Epoch of the sampler or dataset when reading began; `None` if unknown."""
        self._left_at, self._last, self._warned = self._now, 0, False

    def begin(self, epoch: int, *, begun: bool, by_hand: bool, trains: bool) -> None:
        """Set the epoch. With `begun`, a part of it has been given already, so that its order is fixed.

        Without `trains`, as for an evaluation, a script may leave the order as it is.
        """
        set_by_script = self._now != self._left_at
        if begun and self.in_use is not None:
            self._set(self.in_use)
        elif (self._always or not by_hand) and not set_by_script:
            self._set(epoch)
        elif self._now is not None and not set_by_script and not self._warned and epoch > self._last:
            self._warned = trains and getattr(self._parts[0], "shuffle", None) is True
            if self._warned:
                logger.warning(
                    "%s.set_epoch was not called: epoch %d has the order of the previous one, as with torch's "
                    "DataLoader; call loader.sampler.set_epoch(epoch) before each epoch",
                    *(type(self._parts[0]).__name__, epoch),
                )
        self.in_use, self._left_at, self._last = self._now, self._now, epoch

    def _set(self, epoch: int) -> None:
        for part in self._parts:
            part.set_epoch(epoch)

    @property
    def _now(self) -> int | None:
        epoch = getattr(self._parts[0], "epoch", None) if self._parts else None
        return epoch if isinstance(epoch, int) else None


class IndexOrder:
    """The order of a dataset's indices: sequential, or shuffled in each epoch."""

    limitation: str | None = None
    shared_iterator: str | None = None
    shards, generators = 1, GeneratorStates()

    def __init__(self, dataset: Dataset[Any], seed: int, shuffle: bool) -> None:
        self.epochs = EpochSetter()
        if not isinstance(dataset, Sized):
            raise TypeError(f"DataLoader: {type(dataset).__name__} has no len(); give a sampler")
        self._dataset, self._seed, self._shuffle = dataset, seed, shuffle
        self.name = "shuffled" if shuffle else "sequential"

    @property
    def size(self) -> int:
        return len(self._dataset)

    def draw(self, epoch: int) -> Permutation | ListedOrder:
        return Permutation(self.size, self._seed, epoch) if self._shuffle else ListedOrder(range(self.size))


class ListedOrder:
    """The order of a range."""

    def __init__(self, items: range) -> None:
        self._items, self.size = items, len(items)

    def at(self, places: range) -> Iterator[int]:
        return (self._items[place % self.size] for place in places)


class IndexedBatches:
    """The batches of a map-style dataset, from any position on.

    A position is valid only for an order of the same `name`.

    Args:
        order: order of samples; or, with `by_batch`, of batches, each a collection of indices.
        share: this rank's share of it.
        options: options for the torch loader, which reads the samples.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        order: IndexOrder | SamplerOrder,
        share: RankShare,
        seed: int,
        options: dict[str, Any],
        *,
        batch_size: int | None,
        by_batch: bool = False,
    ) -> None:
        self._order, self._batch_size, self._by_batch = order, batch_size, by_batch
        self._share = share if order.shards == 1 else replace(share, rank=0, world_size=1)
        self._indices, self._options = _Indices(), options
        self._by_sample = by_sample = batch_size is None and not by_batch
        self.collate_fn = options.pop("collate_fn", None) or (
            torch.utils.data.default_convert if by_sample else torch.utils.data.default_collate
        )
        read = GeneratorStates(dataset=dataset, collate_fn=self.collate_fn)
        has_workers = bool(options.get("num_workers"))
        self._in_workers = read if has_workers else GeneratorStates()
        """Generators of which every worker has a copy, whose state no checkpoint holds."""
        self.generators = LoaderGenerators(GeneratorStates() if has_workers else read, order.generators)
        self._seeded = SeededDataset(dataset, seed, self.collate_fn)
        self.loader: torch.utils.data.DataLoader[Any] = self._reading(self._seeded, self._indices, options)

    @property
    def order(self) -> str:
        return self._order.name

    @property
    def epochs(self) -> EpochSetter:
        return self._order.epochs

    @property
    def exclusive(self) -> bool:
        """Whether a new iterator takes over from an open one: persistent workers read for one at a time."""
        return self.loader.persistent_workers

    @property
    def draws_nothing(self) -> bool:
        """Whether samples were read in this process, and the first of them drew no random number."""
        return self._seeded.draws_nothing and not self.generators.continued()

    state: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any] | None:
        """Return `None`: everything follows from the position."""
        return self.state

    @property
    def extent(self) -> str:
        """Number and kind of items that positions count."""
        size = self._order.size
        return f"{'?' if size is None else format(size, ',')} {self._items}"

    @property
    def limitation(self) -> str | None:
        limitations = [self._order.limitation] if self._order.limitation else []
        if paths := self._in_workers.paths:
            limitations.append(
                f"{', '.join(paths)}: every worker has its own copy of this generator, and no checkpoint has its "
                "state: its numbers differ after a resume. Draw from the generators of Python, NumPy or torch, "
                "which are seeded for each sample, or set num_workers=0"
            )
        size, ranks = self._order.size, self._share.world_size
        if not self._order.limitation and size is not None and self._share.tail == "pad" and size % ranks:
            limitations.append(
                f"{size:,} {self._items} do not divide evenly among {ranks} ranks: {-size % ranks} occur twice in "
                "an epoch, so that all ranks run the same number of iterations; use drop_last=True or "
                "tail='short' to avoid that"
            )
        return "; ".join(limitations) or None

    @property
    def shared_iterator(self) -> str | None:
        return self._order.shared_iterator

    def __len__(self) -> int:
        if self._order.size is None:
            raise TypeError(f"DataLoader: {self._order.name} has no len()")
        return self._share.iterations(0, self._order.size)

    def left(self, start: DataPosition) -> int:
        """Count the batches of this rank from `start` to the end of its epoch; TypeError if unknown."""
        if self._order.size is None:
            return len(self)
        return self._share.iterations(start.taken // self._order.shards, self._order.size)

    def leave_out(self, start: DataPosition, batches: int) -> DataPosition:
        """Return the position so many batches after `start`, of which none is read.

        Raises:
            ValueError: the end of the epoch is unknown.
        """
        if (size := self._order.size) is None:
            raise ValueError(f"{self._order.name} has no len(), so the end of the epoch is unknown")
        if not len(self):
            raise ValueError("an epoch has no batch")
        most = replace(self._share, rank=0)  # with a short tail other ranks may have one fewer
        while batches:
            first = start.taken // self._order.shards
            left = most.iterations(first, size)
            if batches < left:
                place, _ = most.after(first, batches, size)
                return replace(start, taken=place * self._order.shards)
            batches -= left
            start = DataPosition(epoch=start.epoch + 1, padded=start.padded)
        return start

    def batches(self, start: DataPosition) -> Iterator[tuple[DataPosition, Any]]:
        """Yield each batch with the position after it."""
        first, begun = start.taken // self._order.shards, start.taken > 0
        self.generators.begin(start.epoch, begun=begun)
        drawn = self._order.draw(start.epoch)
        if not isinstance(drawn, (Permutation, ListedOrder)):
            drawn.begin(first)
            items: Iterator[Any] = drawn.items(first, self._share)
        else:
            items = drawn.at(self._share.places(first, drawn.size))
        self.generators.reach()
        # drawn here once, also for what workers read ahead: the position of the loader may change meanwhile
        remaining = self._indices.remaining = _Ahead(self._keyed(start.epoch, items))
        try:
            for number, batch in enumerate(iterate_loader(self.loader), start=1):
                place, padded = self._share.after(first, number, drawn.size)
                yield replace(start, taken=place * self._order.shards, padded=start.padded + padded), batch
        finally:
            if self._indices.remaining is remaining:
                self._indices.remaining = None

    def pass_over(self, position: DataPosition) -> None:
        """Draw the rest of an epoch, if later ones depend on it."""
        if self.generators.repeats:
            self.generators.begin(position.epoch, begun=True)
            drawn = self._order.draw(position.epoch)
            if not isinstance(drawn, (Permutation, ListedOrder)):
                drawn.pass_over()
        self.generators.reach(passed=True)

    def upcoming(self, start: DataPosition, batches: int) -> list[Key | list[Key]]:
        """Return the keys of the next batches that no worker has been given yet, without consuming them.

        There are fewer if a sampler decides on the next epoch, and none if it has no length: peeking would draw
        from it.
        """
        remaining = self._indices.remaining
        found: list[Key | list[Key]] = []
        if remaining is not None and self._order.size is not None:
            found, start = remaining.peek(batches), DataPosition(epoch=start.epoch + 1)
        while isinstance(self._order, IndexOrder) and len(self) and len(found) < batches:
            drawn = self._order.draw(start.epoch)
            coming = self._keyed(start.epoch, drawn.at(self._share.places(start.taken, drawn.size)))
            found += itertools.islice(coming, batches - len(found))
            start = DataPosition(epoch=start.epoch + 1)
        return found

    def second_loader(
        self,
        coming: list[Key | list[Key]],
        around: Callable[[SeededDataset], Dataset[Any]],
        timeout_seconds: float,
    ) -> torch.utils.data.DataLoader[Any]:
        """Return a loader of these keys with its own workers, independent of the first loader."""
        own = {
            "generator": torch.Generator(),  # a new iterator draws a number
            "persistent_workers": False,
            "pin_memory": False,
            "timeout": timeout_seconds if self.loader.num_workers else 0,
        }
        return self._reading(around(self._seeded), coming, self._options | own)

    def _reading(
        self, dataset: Dataset[Any], indices: Iterable[Any], options: dict[str, Any]
    ) -> torch.utils.data.DataLoader[Any]:
        how = {"batch_size": None, "sampler": indices} if self._by_sample else {"batch_sampler": indices}
        return torch.utils.data.DataLoader(dataset, collate_fn=unchanged_batch, **how, **options)

    def _keyed(self, epoch: int, items: Iterator[Any]) -> Iterator[Key | list[Key]]:
        if self._by_sample:
            return (_key(epoch, index) for index in items)
        if self._batch_size is not None:
            items = iter(BatchSampler(items, self._batch_size, self._share.tail == "drop"))
        return ([_key(epoch, index) for index in batch] for batch in items)

    @property
    def _items(self) -> str:
        return "batches" if self._by_batch else "samples"


class _Indices(Sampler[Any]):
    """The sampler of torch's loader: gives the keys of the current iterator."""

    remaining: _Ahead | None = None
    """Keys that are left; `None` between epochs."""

    def __iter__(self) -> Iterator[Any]:
        return self.remaining or iter(())


class _Ahead(Iterator[Any]):
    """An iterator whose next items can be peeked at."""

    def __init__(self, items: Iterator[Any]) -> None:
        self._items, self._looked_at = items, deque[Any]()

    def __next__(self) -> Any:
        return self._looked_at.popleft() if self._looked_at else next(self._items)

    def peek(self, count: int) -> list[Any]:
        self._looked_at.extend(itertools.islice(self._items, max(0, count - len(self._looked_at))))
        return list(itertools.islice(self._looked_at, count))


def _key(epoch: int, index: Any) -> Key:
    """Add the epoch to an index: persistent workers cannot learn it otherwise."""
    try:
        return epoch, operator.index(index)
    except TypeError:
        return epoch, index
