"""Datasets whose samples are asked for by index: in which order, by which rank, and how far that has come."""

from __future__ import annotations

import itertools
import logging
import operator
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch.utils.data import BatchSampler, Dataset, Sampler

from holdfast.data.order import Permutation, Share
from holdfast.data.seeding import Key, Seeded, as_it_is, random_state_kept, seed_all
from holdfast.system.preemption import begun

logger = logging.getLogger("holdfast")


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where training stands in its data: what finished iterations have taken of `epoch` (from 0).

    In samples, on all ranks together. Where a batch_sampler makes the batches: in batches, on all ranks together.
    For an iterable dataset: in batches, of this rank.
    """

    epoch: int = 0
    taken: int = 0
    padded: int = 0
    """Given a second time so far, in all epochs, so that every rank got equally many."""


class Drawn(Protocol):
    """The order of one epoch."""

    size: int

    def at(self, places: range) -> Iterator[Any]: ...


class Order(Protocol):
    """What decides on the order of every epoch."""

    name: str
    """A position counted in an order of another name means nothing here."""
    shards: int
    """Among how many ranks it shares itself out. Then what is drawn is one rank's part."""
    epochs: Epochs

    @property
    def gap(self) -> str | None:
        """What it cannot promise, in words."""
        ...

    @property
    def size(self) -> int | None:
        """Of an epoch; None where only reading to its end would tell."""
        ...

    def draw(self, epoch: int) -> Drawn: ...


class Epochs:
    """Calls `set_epoch` of samplers or of a dataset.

    Which epoch such an object is in shows in its attribute `epoch`; what the script has set is left as it is.

    Args:
        always: also for a loop of the script's own, which with torch's loader would call it itself.
    """

    def __init__(self, *parts: Any, always: bool = False) -> None:
        self._parts = [part for part in parts if hasattr(part, "set_epoch")]
        self._always = always
        self.in_use: int | None = None
        """The epoch that the sampler or dataset was in when reading began; None where it does not show."""
        self._left_at, self._last, self._warned = self._now, 0, False

    def begin(self, epoch: int, *, begun: bool, by_hand: bool) -> None:
        """`begun`: a part of the epoch has been given out, so that its order is fixed."""
        set_by_script = self._now != self._left_at
        if begun and self.in_use is not None:
            self._set(self.in_use)
        elif (self._always or not by_hand) and not set_by_script:
            self._set(epoch)
        elif self._now is not None and not set_by_script and not self._warned and epoch > self._last:
            self._warned = getattr(self._parts[0], "shuffle", None) is True
            if self._warned:
                logger.warning(
                    "%s.set_epoch was not called: epoch %d comes in the order of the one before, as with torch's "
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


class OwnOrder:
    """Of a dataset's indices: as they are, or shuffled anew each epoch."""

    gap: str | None = None
    shards = 1

    def __init__(self, dataset: Dataset[Any], seed: int, shuffle: bool) -> None:
        self.epochs = Epochs()
        if not isinstance(dataset, Sized):
            raise TypeError(f"DataLoader: {type(dataset).__name__} has no len(); give a sampler")
        self._dataset, self._seed, self._shuffle = dataset, seed, shuffle
        self.name = "shuffled" if shuffle else "sequential"

    @property
    def size(self) -> int:
        return len(self._dataset)

    def draw(self, epoch: int) -> Drawn:
        return Permutation(self.size, self._seed, epoch) if self._shuffle else _Listed(range(self.size))


class SamplerOrder:
    """Of somebody else's making: what a sampler, or a batch sampler, gives when it is iterated."""

    def __init__(self, source: Iterable[Any], seed: int) -> None:
        self._source, self._seed = source, seed
        self._parts: tuple[Any, ...] = (source, getattr(source, "sampler", None))
        self.name, self.epochs = type(source).__name__, Epochs(*self._parts)
        sharing = (part for part in self._parts if hasattr(part, "num_replicas") and hasattr(part, "rank"))
        self.shards = int(getattr(next(sharing, None), "num_replicas", 1))

    @property
    def size(self) -> int | None:
        return len(self._source) if isinstance(self._source, Sized) else None

    @property
    def gap(self) -> str | None:
        if self.size is None:
            return (
                f"{self.name} has no len() and is drawn from as training goes: unless its order follows from the "
                "epoch, samples may come twice or not at all after a resume"
            )
        if any(getattr(part, "generator", None) is not None for part in self._parts):
            return (
                f"{self.name} draws its order from a generator of its own, which is not checkpointed: "
                "after a resume samples may come twice or not at all"
            )
        if self.shards > 1:
            return (
                f"{self.name} shares samples among {self.shards} ranks by itself: on another number of ranks some "
                "may come twice or not at all. Without it holdfast.DataLoader shares them, for any number"
            )
        return None

    def draw(self, epoch: int) -> Drawn:
        """A sampler that draws at random draws the same whenever it draws for this epoch."""
        if self.size is None:
            return _Read(self._source)
        with random_state_kept():
            seed_all(self._seed, "order", epoch)
            return _Listed(list(self._source))


class _Listed:
    def __init__(self, items: list[Any] | range) -> None:
        self._items, self.size = items, len(items)

    def at(self, places: range) -> Iterator[Any]:
        return (self._items[place % self.size] for place in places)


class _Read:
    """Ends when it ends."""

    size = sys.maxsize

    def __init__(self, source: Iterable[Any]) -> None:
        self._source = source

    def at(self, places: range) -> Iterator[Any]:
        return itertools.islice(self._source, places.start, None, places.step)


class Indexed:
    """The batches of a map-style dataset, from any position on.

    Args:
        order: of samples; or, with `by_batch`, of batches, each a collection of indices.
        share: what this rank takes of it.
        options: for the torch loader, which reads as it is told.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        order: Order,
        share: Share,
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
        self._seeded = Seeded(dataset, seed, self.collate_fn)
        self.loader: torch.utils.data.DataLoader[Any] = self._reading(self._seeded, self._indices, options)

    @property
    def order(self) -> str:
        return self._order.name

    @property
    def epochs(self) -> Epochs:
        return self._order.epochs

    @property
    def exclusive(self) -> bool:
        """A new iterator takes over from an open one: persistent workers read for one at a time."""
        return self.loader.persistent_workers

    state: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any] | None:
        """Nothing: all follows from the position."""
        return self.state

    @property
    def extent(self) -> str:
        """What positions are counted among."""
        size = self._order.size
        return f"{'?' if size is None else format(size, ',')} {self._items}"

    @property
    def gap(self) -> str | None:
        size, ranks = self._order.size, self._share.world_size
        if self._order.gap or size is None or self._share.tail != "pad" or size % ranks == 0:
            return self._order.gap
        return (
            f"{size:,} {self._items} do not divide among {ranks} ranks: {-size % ranks} come twice in an epoch, "
            "so that all ranks make equally many iterations; with drop_last=True or tail='short' none does"
        )

    def __len__(self) -> int:
        if self._order.size is None:
            raise TypeError(f"DataLoader: {self._order.name} has no len()")
        return self._share.iterations(0, self._order.size)

    def left(self, start: Position) -> int:
        """Batches of this rank from `start` to the end of its epoch; TypeError where that cannot be known."""
        if self._order.size is None:
            return len(self)
        return self._share.iterations(start.taken // self._order.shards, self._order.size)

    def batches(self, start: Position) -> Iterator[tuple[Position, Any]]:
        """Each with the position after it."""
        drawn, first = self._order.draw(start.epoch), start.taken // self._order.shards
        items = drawn.at(self._share.places(first, drawn.size))
        # drawn here, once for all that workers read ahead: meanwhile the loader may be set elsewhere
        remaining = self._indices.remaining = _Ahead(self._keyed(start.epoch, items))
        try:
            for number, batch in enumerate(begun(self.loader), start=1):
                place, padded = self._share.after(first, number, drawn.size)
                yield replace(start, taken=place * self._order.shards, padded=start.padded + padded), batch
        finally:
            if self._indices.remaining is remaining:
                self._indices.remaining = None

    def upcoming(self, start: Position, batches: int) -> list[Key | list[Key]]:
        """The next batches that nobody was told to read yet, as collections of keys; each still comes in its turn.

        Fewer where only a sampler knows what comes after this epoch, and none where it has no length: to ask it
        would be to draw from it.
        """
        remaining = self._indices.remaining
        found: list[Key | list[Key]] = []
        if remaining is not None and self._order.size is not None:
            found, start = remaining.peek(batches), Position(epoch=start.epoch + 1)
        while isinstance(self._order, OwnOrder) and len(self) and len(found) < batches:
            drawn = self._order.draw(start.epoch)
            coming = self._keyed(start.epoch, drawn.at(self._share.places(start.taken, drawn.size)))
            found += itertools.islice(coming, batches - len(found))
            start = Position(epoch=start.epoch + 1)
        return found

    def second_loader(
        self, coming: list[Key | list[Key]], around: Callable[[Seeded], Dataset[Any]], timeout_seconds: float
    ) -> torch.utils.data.DataLoader[Any]:
        """Reads these as the first loader would, with workers of its own, and touches nothing of the first one."""
        own = {
            "generator": torch.Generator(),  # to begin reading draws a number
            "persistent_workers": False,
            "pin_memory": False,
            "timeout": timeout_seconds if self.loader.num_workers else 0,
        }
        return self._reading(around(self._seeded), coming, self._options | own)

    def _reading(
        self, dataset: Dataset[Any], indices: Iterable[Any], options: dict[str, Any]
    ) -> torch.utils.data.DataLoader[Any]:
        how = {"batch_size": None, "sampler": indices} if self._by_sample else {"batch_sampler": indices}
        return torch.utils.data.DataLoader(dataset, collate_fn=as_it_is, **how, **options)

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
    """What torch's loader draws from: whatever is to come next."""

    remaining: _Ahead | None = None
    """None between epochs."""

    def __iter__(self) -> Iterator[Any]:
        return self.remaining or iter(())


class _Ahead(Iterator[Any]):
    """Can be looked at before it is drawn from."""

    def __init__(self, items: Iterator[Any]) -> None:
        self._items, self._looked_at = items, deque[Any]()

    def __next__(self) -> Any:
        return self._looked_at.popleft() if self._looked_at else next(self._items)

    def peek(self, count: int) -> list[Any]:
        self._looked_at.extend(itertools.islice(self._items, max(0, count - len(self._looked_at))))
        return list(itertools.islice(self._looked_at, count))


def _key(epoch: int, index: Any) -> Key:
    """With the epoch, since workers that persist learn of it by no other way."""
    try:
        return epoch, operator.index(index)
    except TypeError:
        return epoch, index
