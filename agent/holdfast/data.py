"""The resumable loader: the order of samples is a pure function of (seed, epoch), its position a number.

Reading a sample is seeded by (seed, epoch, index), so that random augmentation is the same for any number of
workers, none included, and on any resume; the training process's own random state is left alone.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import sys
from collections.abc import Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch.utils.data import BatchSampler, Dataset, IterableDataset, Sampler, Subset

T = TypeVar("T")
Key = tuple[int, int]
"""(epoch, index): what a worker needs to know to read a sample the same way as any other worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where training stands in its data: `samples` of `epoch` (from 0) belong to finished iterations."""

    epoch: int = 0
    samples: int = 0
    batches: int = 0


class DataLoader:
    """Takes what `torch.utils.data.DataLoader` takes, and can go on from any position.

    Args:
        dataset: map-style; an iterable one is read again from its start and skipped forward.
        batch_size: samples a batch.
        shuffle: a new permutation every epoch, drawn from (seed, epoch).
        seed: of permutations and of the random numbers that reading a sample draws.
        sampler, batch_sampler: as in torch. They are iterated under random numbers that follow from
            (seed, epoch), and `set_epoch(epoch)` is called where they have it.
        **options: num_workers, collate_fn, pin_memory, persistent_workers … as in torch.

    Iterating gives one epoch after another: each `iter()` goes on where the one before ended. Other
    attributes are those of the torch loader inside. A dataset with `__getitems__` of its own is read by
    whole batches, whose random numbers follow from their first sample.

    Raises:
        ValueError: arguments that exclude each other, as in torch; or `generator`, which `seed` replaces.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = 1,
        shuffle: bool = False,
        *,
        seed: int = 0,
        sampler: Iterable[int] | None = None,
        batch_sampler: Iterable[Sequence[int]] | None = None,
        drop_last: bool = False,
        **options: Any,
    ) -> None:
        if options.pop("generator", None) is not None:
            raise ValueError("DataLoader(generator=...): the order follows from seed; give seed=... instead")
        if sampler is not None and shuffle:
            raise ValueError("DataLoader(sampler=..., shuffle=True): the sampler decides the order; drop shuffle")
        if batch_sampler is not None and (sampler is not None or shuffle or drop_last or batch_size != 1):
            raise ValueError(
                "DataLoader(batch_sampler=...) decides on batch_size, shuffle, sampler, drop_last; drop them"
            )
        self.dataset, self.seed, self.position = dataset, seed, Position()
        self.batch_size, self.drop_last = (None if batch_sampler is not None else batch_size), drop_last
        self._placed = 0
        # a private generator, or every new iterator would draw a number from the training process's own
        options["generator"] = torch.Generator().manual_seed(_hash(seed, "loader"))
        self._order: _Order | None = None
        if isinstance(dataset, IterableDataset):
            loader = torch.utils.data.DataLoader(dataset, batch_size=batch_size, drop_last=drop_last, **options)
        elif batch_sampler is not None:
            self._order = _BatchOrder(batch_sampler, seed)
        else:
            source = sampler if sampler is not None else _Permutation(dataset, seed, shuffle)
            self._order = _Order(source, seed, batch_size, drop_last)
        if self._order is not None:
            whole = batch_sampler is None and batch_size is None
            how = {"batch_size": None, "sampler": self._order} if whole else {"batch_sampler": self._order}
            loader = torch.utils.data.DataLoader(_Seeded(dataset, seed), **how, **options)
        self._loader = loader

    @property
    def gap(self) -> str | None:
        """What this loader cannot promise of a resume, in words."""
        if self._order is None:
            return "an iterable dataset is read again from its start after a resume; its augmentation may differ"
        return self._order.gap

    def __len__(self) -> int:
        """Batches in a whole epoch."""
        return len(self._order) if self._order is not None else len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        """The rest of the epoch from `position`, which moves on with each batch given out.

        Set to another position meanwhile, by a restore, it goes on from there.
        """
        placed = -1
        while placed != self._placed:
            placed, start = self._placed, self.position
            source = self._batches_by_number(start) if self._order is None else self._batches_by_sample(start)
            for position, batch in source:
                self.position = position
                yield batch
                if placed != self._placed:
                    break
        self.position = Position(epoch=self.position.epoch + 1)

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self.seed, **asdict(self.position)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a position; ValueError when it was counted in another order."""
        if state_dict["seed"] != self.seed:
            raise ValueError(
                f"DataLoader(seed={self.seed}): the checkpoint's position was counted with "
                f"seed={state_dict['seed']}"
            )
        self.position = Position(**{key: state_dict[key] for key in ("epoch", "samples", "batches")})
        self._placed += 1

    def _batches_by_sample(self, start: Position) -> Iterator[tuple[Position, Any]]:
        assert self._order is not None
        self._order.start = start
        sizes = self._order.sizes = []
        samples = start.samples
        for number, batch in enumerate(self._loader):
            samples += sizes[number]
            yield Position(epoch=start.epoch, samples=samples, batches=start.batches + number + 1), batch

    def _batches_by_number(self, start: Position) -> Iterator[tuple[Position, Any]]:
        for number, batch in enumerate(self._loader, start=1):
            if number > start.batches:
                yield Position(epoch=start.epoch, batches=number), batch


class _Permutation(Sampler[int]):
    """All indices of a dataset, in the order of an epoch."""

    def __init__(self, dataset: Dataset[Any], seed: int, shuffle: bool) -> None:
        if not isinstance(dataset, Sized):
            raise TypeError(f"DataLoader: {type(dataset).__name__} has no len(); give a sampler")
        self._size, self._seed, self._shuffle, self._epoch = len(dataset), seed, shuffle, 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[int]:
        if not self._shuffle:
            return iter(range(self._size))
        generator = torch.Generator().manual_seed(_hash(self._seed, "order", self._epoch))
        return iter(torch.randperm(self._size, generator=generator).tolist())


class _Order(Sampler[Any]):
    """What is left of an epoch: (epoch, index) pairs, or lists of them, from `start` on.

    `sizes` gets the number of samples of each batch drawn, in order, so that the position can follow what
    the loop was given although workers are ahead of it.
    """

    def __init__(self, source: Iterable[Any], seed: int, batch_size: int | None, drop_last: bool) -> None:
        self._source, self._seed = source, seed
        self._batch_size, self._drop_last = batch_size, drop_last
        self.start = Position()
        self.sizes: list[int] = []
        own = getattr(source, "generator", None) is not None
        self.gap = (
            f"{type(source).__name__} draws its order from a generator of its own, which is not checkpointed: "
            "after a resume samples may come twice or not at all"
            if own or not isinstance(source, Sized)
            else None
        )

    def __len__(self) -> int:
        length = len(self._source)  # type: ignore[arg-type]
        if self._batch_size is None:
            return length
        return length // self._batch_size if self._drop_last else -(-length // self._batch_size)

    def __iter__(self) -> Iterator[Any]:
        # bound here, not when the first is drawn: by then the loader may have been set elsewhere
        return self._keyed(self.start.epoch, self._remaining(self.start), self.sizes)

    def _remaining(self, start: Position) -> Iterator[Any]:
        """Skips by samples, so that a position holds under another batch size as well."""
        left = itertools.islice(self._whole(start.epoch), start.samples, None)
        if self._batch_size is None:
            return left
        return iter(BatchSampler(left, self._batch_size, self._drop_last))

    def _whole(self, epoch: int) -> Iterable[Any]:
        """The whole epoch. A sampler that draws at random draws the same at every start."""
        samplers: tuple[Any, ...] = (self._source, getattr(self._source, "sampler", None))
        for sampler in samplers:
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
        if isinstance(self._source, _Permutation) or not isinstance(self._source, Sized):
            return self._source
        with _random_state_kept():
            _seed_all(_hash(self._seed, "order", epoch))
            return list(self._source)

    @staticmethod
    def _keyed(epoch: int, items: Iterator[Any], sizes: list[int]) -> Iterator[Any]:
        for item in items:
            if hasattr(item, "__index__"):
                sizes.append(1)
                yield (epoch, int(item))
            else:
                sizes.append(len(item))
                yield [(epoch, int(index)) for index in item]


class _BatchOrder(_Order):
    """The same over batches of somebody else's making, which can only be skipped whole."""

    def __init__(self, source: Iterable[Sequence[int]], seed: int) -> None:
        super().__init__(source, seed, None, False)

    def _remaining(self, start: Position) -> Iterator[Any]:
        return itertools.islice(self._whole(start.epoch), start.batches, None)


class _Seeded(Dataset[Any]):
    """A dataset whose samples are read under random numbers of their own."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset, self._seed = dataset, seed
        # torch's Subset has the method, too, but no wish of its own to be read so
        self._by_batches = hasattr(dataset, "__getitems__") and not isinstance(dataset, Subset)

    def __getitem__(self, key: Key) -> Any:
        with _random_state_kept():
            return self._read(key)

    def __getitems__(self, keys: list[Key]) -> list[Any]:
        with _random_state_kept():
            if self._by_batches:
                _seed_all(_hash(self._seed, *keys[0]))
                return list(self._dataset.__getitems__([index for _, index in keys]))
            return [self._read(key) for key in keys]

    def _read(self, key: Key) -> Any:
        _seed_all(_hash(self._seed, *key))
        return self._dataset[key[1]]


@contextmanager
def _random_state_kept() -> Iterator[None]:
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


def _seed_all(seed: int) -> None:
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed & 0xFFFF_FFFF)


def _hash(*parts: int | str) -> int:
    """63 bits from a few small values; nearby ones give unrelated results."""
    text = "/".join(str(part) for part in parts).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


class Cursor(Protocol):
    """The data side of `session.batches`: epochs of batches from a position that can be saved and set."""

    gap: str | None
    """The promise that this loader cannot keep, in words, if there is one."""

    @property
    def epoch(self) -> int: ...

    def batches(self) -> Iterator[Any]:
        """The rest of the current epoch; `epoch` moves on when it is used up."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch given out."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any] | None) -> None:
        """Go to a position; None: to the very start."""
        ...


class _HoldfastCursor:
    def __init__(self, loader: DataLoader) -> None:
        self._loader, self.gap = loader, loader.gap

    @property
    def epoch(self) -> int:
        return self._loader.position.epoch

    def batches(self) -> Iterator[Any]:
        return iter(self._loader)

    def state_dict(self) -> dict[str, Any]:
        return self._loader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any] | None) -> None:
        self._loader.load_state_dict(state_dict or {"seed": self._loader.seed, **asdict(Position())})


class _StatefulCursor:
    """A loader that keeps its own position, such as torchdata's StatefulDataLoader."""

    def __init__(self, loader: Any) -> None:
        self._loader, self.epoch, self._given = loader, 0, 0
        self.gap: str | None = (
            f"{type(loader).__name__} keeps its own position; after a resume random augmentation in its "
            "workers may differ"
        )

    def batches(self) -> Iterator[Any]:
        for batch in self._loader:
            self._given += 1
            yield batch
        self.epoch, self._given = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        # between epochs there is no position to keep, and some loaders keep the end of the last one
        state = self._loader.state_dict() if self._given else None
        return {"epoch": self.epoch, "given": self._given, "loader": state}

    def load_state_dict(self, state_dict: dict[str, Any] | None) -> None:
        state_dict = state_dict or {"epoch": 0, "given": 0, "loader": None}
        self.epoch, self._given = state_dict["epoch"], state_dict["given"]
        if state_dict["loader"] is not None:
            self._loader.load_state_dict(state_dict["loader"])


class _CountingCursor:
    """Any iterable: its epoch is started again and read up to where training stood."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader, self.epoch, self._given = loader, 0, 0
        self.gap: str | None = (
            f"{type(loader).__name__} cannot go on from a position: after a resume its epoch is read again from "
            "the start up to where training stood, in an order that may differ. holdfast.DataLoader takes the "
            "same arguments and resumes exactly"
        )

    def batches(self) -> Iterator[Any]:
        skip, self._given = self._given, 0
        for batch in self._loader:
            self._given += 1
            if self._given > skip:
                yield batch
        self.epoch, self._given = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "given": self._given}

    def load_state_dict(self, state_dict: dict[str, Any] | None) -> None:
        state_dict = state_dict or {"epoch": 0, "given": 0}
        self.epoch, self._given = state_dict["epoch"], state_dict["given"]


def cursor_over(loader: Iterable[Any]) -> Cursor:
    """A cursor for any loader."""
    if isinstance(loader, DataLoader):
        return _HoldfastCursor(loader)
    if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
        return _StatefulCursor(loader)
    return _CountingCursor(loader)
