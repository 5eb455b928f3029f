"""The resumable loader: the order of samples is a pure function of (seed, epoch), its position a number."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch.utils.data import BatchSampler, Dataset, IterableDataset, RandomSampler, SequentialSampler

from holdfast.data.indexed import Indexed, Order, OwnOrder, Position, SamplerOrder
from holdfast.data.order import Share, hashed
from holdfast.data.streams import Streamed
from holdfast.distributed.ranks import rank_and_world_size

__all__ = ["DataLoader", "Position"]

logger = logging.getLogger("holdfast")

_HOW_TO_COUNT = "loop over the loader, or over range(loader.batches_left(loader.epoch + 1))"


class DataLoader:
    """Takes what `torch.utils.data.DataLoader` takes, and can go on from any position.

    Args:
        dataset: map-style; or iterable, which goes on by its own state_dict where it is read in this process,
            and is otherwise read again from its start and skipped forward.
        batch_size: samples a batch, on each rank.
        shuffle: a new permutation every epoch, drawn from (seed, epoch).
        seed: of permutations and of the random numbers that reading a sample draws.
        sampler, batch_sampler: as in torch. They are iterated under random numbers that follow from
            (seed, epoch). Call their `set_epoch` as with torch's loader; under `session.batches` that is done
            for you, with epochs from 0, unless the script does it.
        rank, world_size: which part of the global order is this loader's. Default: torch.distributed's where
            it is set up, else RANK and WORLD_SIZE, else everything. A sampler with a `rank` and `num_replicas` of
            its own, such as DistributedSampler, has shared the samples already; an iterable dataset must.
        tail: what becomes of a last iteration for which fewer samples are left than the ranks take, unless
            drop_last leaves it out. "pad": all ranks get equally many, and up to world_size - 1 samples come a
            second time, which `padded` counts. "short": every sample comes once. Some ranks get one fewer, and
            where fewer samples than ranks are left, some end the epoch an iteration early: under
            DistributedDataParallel that needs its `join`.
        **options: num_workers, collate_fn, pin_memory, persistent_workers … as in torch.

    An iteration takes the next batch_size × world_size samples of the global order, and the position counts what
    finished iterations took, on all ranks: it holds for any number of ranks and workers and any batch size.

    Each `iter()` begins an epoch at its first batch, as torch's does. The first one after a resume gives the rest
    of the epoch that the checkpoint was taken in, which is empty after its last batch. An epoch is over when its
    last batch has been given out, or when the loop leaves it after a `session.step`. Batches that are only looked
    at, `next(iter(loader))`, come again. Without a session to count iterations, each `iter()` takes a new epoch.

    A sample is read under random numbers that follow from (seed, epoch, index), in Python, NumPy and torch on the
    CPU; a batch is collated under ones that follow from its first sample, as is one that a dataset's
    `__getitems__` reads whole. Other attributes are those of the torch loader inside.

    Raises:
        ValueError: arguments that exclude each other, as in torch; or `generator`, which `seed` replaces.
    """

    watched_by: ClassVar[list[weakref.WeakSet[DataLoader]]] = []
    """Loaders that gave a batch since each open session last looked: it warns of one that it was not given."""

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = 1,
        shuffle: bool = False,
        *,
        seed: int = 0,
        sampler: Iterable[Any] | None = None,
        batch_sampler: Iterable[Sequence[Any]] | None = None,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        tail: Literal["pad", "short"] = "pad",
        **options: Any,
    ) -> None:
        _refuse(options, shuffle, sampler, batch_sampler, drop_last, batch_size)
        self.dataset, self.seed, self.position = dataset, seed, Position()
        self._given_sampler, self._given_batch_sampler, self._shuffle = sampler, batch_sampler, shuffle
        self.batch_size, self.drop_last = (None if batch_sampler is not None else batch_size), drop_last
        self.rank, self.world_size = _place_among_ranks(rank, world_size)
        if tail not in ("pad", "short"):
            raise ValueError(f"DataLoader(tail={tail!r}): 'pad' or 'short'")
        # a private generator: the number that a new iterator draws is drawn by _draw_base_seed, once an epoch
        options["generator"] = torch.Generator().manual_seed(hashed(seed, "loader") >> 1)
        self._inner: Indexed | Streamed
        if isinstance(dataset, IterableDataset):
            options |= {"batch_size": batch_size, "drop_last": drop_last, "shuffle": shuffle}
            options |= {"sampler": sampler, "batch_sampler": batch_sampler}  # which torch refuses
            self._inner = Streamed(dataset, seed, options, self.world_size)
        else:
            source = sampler if sampler is not None else batch_sampler
            order: Order = SamplerOrder(source, seed) if source is not None else OwnOrder(dataset, seed, shuffle)
            share = Share(
                rank=self.rank,
                world_size=self.world_size,
                batch_size=self.batch_size or 1,
                tail="drop" if drop_last else tail,
            )
            self._inner = Indexed(
                dataset, order, share, seed, options,
                batch_size=self.batch_size, by_batch=batch_sampler is not None,
            )  # fmt: skip
        self.collate_fn = self._inner.collate_fn
        self._misfit: str | None = None
        self._reading = _Reading()
        self._warned: set[str] = set()

    @property
    def epoch(self) -> int:
        """From 0; the next one once a loop has found no more batch, or has begun the next epoch."""
        return self.position.epoch

    @property
    def padded(self) -> int:
        """Samples that came a second time so far, on all ranks, so that each got equally many; batches with a
        batch_sampler."""
        return self.position.padded

    @property
    def gap(self) -> str | None:
        """What this loader cannot promise, in words."""
        return "; ".join(gap for gap in (self._misfit, self._inner.gap) if gap) or None

    @property
    def drawn_directly(self) -> bool:
        """Whether a loop of the script's own is in the middle of an epoch: `for batch in loader`."""
        return self._reading.drawing > 0

    @property
    def sampler(self) -> Any:
        """The one given; else one as torch's loader has, which describes the order and does not decide on it."""
        if self._given_sampler is not None:
            return self._given_sampler
        if isinstance(self._inner, Streamed):
            return self._inner.loader.sampler
        return (RandomSampler if self._shuffle else SequentialSampler)(self.dataset)  # type: ignore[arg-type]

    @property
    def batch_sampler(self) -> Any:
        """The one given; else one as torch's loader has, which describes the batches and does not make them."""
        if self._given_batch_sampler is not None or self.batch_size is None:
            return self._given_batch_sampler
        return BatchSampler(self.sampler, self.batch_size, self.drop_last)

    def __len__(self) -> int:
        """Batches in a whole epoch, on this rank."""
        return len(self._inner)

    def batches_left(self, epochs: int) -> int:
        """Of `epochs` epochs in all, on this rank; TypeError where the dataset or sampler has no length."""
        if self.epoch >= epochs:
            return 0
        return self._inner.left(self.position) + (epochs - self.epoch - 1) * len(self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._inner.loader, name)

    def __iter__(self) -> Iterator[Any]:
        """An epoch from its first batch; the first time after a resume, the rest of the epoch.

        Set to another position meanwhile, by a restore, it goes on from there.
        """
        if not self._goes_on:  # torch draws here, before the first batch is asked for
            self._draw_base_seed()
        elif isinstance(self._inner, Indexed) and self._is_complete():
            logger.info(
                "the checkpoint was taken after the last batch of epoch %d: this loop over the loader gets no "
                "batch, the next one begins epoch %d",
                *(self.epoch, self.epoch + 1),
            )
            ended = f"epoch {self.epoch} had no batch left after the resume"
            self.position = _after(self.position)
            return _none_left(f"{ended}: {_HOW_TO_COUNT}")
        resumed = f"epoch {self.epoch} had fewer batches left after the resume than a whole epoch: {_HOW_TO_COUNT}"
        return self._by_hand(resumed if self._goes_on else None)

    def batches(self) -> Iterator[Any]:
        """What is left of the epoch, for `session.batches`, which decides itself which epoch comes next."""
        iterator = object()
        if not self.position.taken:
            self._draw_base_seed()
        self._reading.counted, self._reading.looked = True, False
        try:
            yield from self._batches(iterator, by_hand=False)
        finally:
            if self._reading.current is iterator:
                self._reading.current, self._reading.counted = None, False

    def _by_hand(self, why_short: str | None) -> Generator[Any, None, str | None]:
        """Give the batches; `why_short` is the message of the StopIteration at their end."""
        iterator, placed = object(), self._reading.placed
        before = self._reading.current, self.position, self._reading.began, self._reading.counted
        dataset_state = self._dataset_state
        if self._reading.counted and self._reading.followed and self._reading.current is None:
            self._warn_once(
                "left early",
                f"the loop over the loader left epoch {self.epoch} early, and the next one begins epoch "
                f"{self.epoch + 1}: a resume from the last checkpoint of epoch {self.epoch} would first give the "
                "rest of it. Draw from session.batches(loader, epochs=None), or give a sampler that makes epochs "
                "shorter",
            )
        self.position = self._beginning()
        self._reading.counted, self._reading.looked = not self._reading.followed, False
        self._reading.drawing += 1
        try:
            yield from self._batches(iterator, by_hand=True)
        finally:
            self._reading.drawing -= 1
            if self._reading.current is iterator:
                self._reading.current = None
                if self._reading.counted and self._is_complete():
                    self.position = _after(self.position)
                ended, interrupted = not self.position.taken, before[0] in self._reading.open
                if self._reading.counted or placed != self._reading.placed or (ended and not interrupted):
                    self._reading.counted = self._reading.counted and not ended
                else:  # nothing was trained on: back to the iterator that it interrupted, or to the beginning
                    self._reading.current, self.position, self._reading.began, self._reading.counted = before
                    self._inner.state = dataset_state
                    if not interrupted:
                        self._reading.current, self._reading.looked = None, True
        return why_short

    def _batches(self, iterator: object, *, by_hand: bool) -> Iterator[Any]:
        """From `position` to the end of its epoch; `position` follows, also to where a restore has set it."""
        self._reading.open.add(iterator)
        try:
            self._reading.current = self._reading.last = iterator
            self._reading.began = began = start = self.position
            placed, again = self._reading.placed, True
            while again:
                again = False
                self._inner.epochs.begin(start.epoch, begun=start.taken > 0, by_hand=by_hand)
                for position, batch in self._inner.batches(start):
                    self.position = start = position
                    for drawn in DataLoader.watched_by:
                        drawn.add(self)
                    yield batch
                    if placed != self._reading.placed:
                        placed, start, again = self._reading.placed, self.position, True
                        self._reading.current = self._reading.last = iterator
                        if not start.taken:
                            self._draw_base_seed()
                        break
                    if self._reading.last is not iterator:  # another iterator was drawn from meanwhile
                        self._take_back(iterator, began, start)
                        if again := self._inner.exclusive:
                            break
            self.position = _after(start)
        finally:
            self._reading.open.discard(iterator)

    def _take_back(self, iterator: object, began: Position, position: Position) -> None:
        """Have the position follow this iterator again."""
        if self._reading.current not in (None, iterator):
            self._reading.counted = True
            self._warn_once(
                "two loops",
                "two loops draw from one holdfast.DataLoader in turn: both may give the same epoch, and a "
                "checkpoint has the position of the one drawn from last; make a loader for each",
            )
        self._reading.current = self._reading.last = iterator
        self._reading.began, self.position = began, position

    def _beginning(self) -> Position:
        """Where a new iterator begins."""
        if self._reading.counted:
            return _after(self.position)
        return self.position if self._reading.current is None else self._reading.began

    @property
    def _goes_on(self) -> bool:
        """A new iterator gives the rest of an epoch, as after a resume."""
        return self._reading.current is None and not self._reading.counted and self.position.taken > 0

    def _warn_once(self, about: str, message: str) -> None:
        if about not in self._warned:
            self._warned.add(about)
            logger.warning(message)

    def _is_complete(self) -> bool:
        """The last batch of the epoch has been given out, as far as its length is known."""
        try:
            return self.position.taken > 0 and self._inner.left(self.position) == 0
        except Exception:  # a dataset or a sampler without a length
            return False

    def _draw_base_seed(self) -> None:
        """Draw the number that torch's loader draws from the global generator when it begins to iterate.

        So that whatever training draws next, dropout for example, is what it would draw with torch's loader.
        Persistent workers take their seed once.
        """
        if not self.persistent_workers or not self._reading.seed_drawn:
            torch.empty((), dtype=torch.int64).random_()
            self._reading.seed_drawn = True

    def follow(self) -> None:
        """A session counts iterations from now on; what was drawn before it began is not counted."""
        if not self._reading.followed:
            self._reading.followed, self._reading.counted, self._reading.looked = True, False, False
            if self._reading.current is None:
                self.position = self._reading.placed_at

    def unfollow(self) -> None:
        """The session is closed."""
        self._reading.followed, self._reading.placed_at = False, self.position

    def iteration_ended(self) -> None:
        """An iteration of the session has ended: what was drawn has been trained on."""
        if self._reading.current is not None:
            self._reading.counted = True
        elif self._reading.counted or self._reading.looked:  # its loop was left: a resume begins the next epoch
            self.position, self._inner.state = _after(self.position), None
            self._reading.counted = self._reading.looked = False

    def second_loader(
        self, batches: int, around: Callable[[Dataset[Any]], Dataset[Any]], timeout_seconds: float
    ) -> torch.utils.data.DataLoader[Any] | None:
        """Over the next batches that no worker was told to read yet, through workers of its own.

        This loader is left as it is, and gives them out in their turn. `around` wraps the dataset that it reads.
        None for an iterable dataset, which nobody can read ahead of its reader.
        """
        if isinstance(self._inner, Streamed):
            return None
        return self._inner.second_loader(self._inner.upcoming(self.position, batches), around, timeout_seconds)

    def seek(self, position: Position) -> None:
        """Go on from there, in the middle of an epoch as well."""
        self.position, self._reading.placed_at, self._misfit = position, position, None
        self._reading.current, self._reading.counted, self._reading.looked = None, False, False
        self._reading.placed += 1

    def state_dict(self) -> dict[str, Any]:
        """A few numbers, whatever the position and the size of the dataset; an iterable dataset adds its own."""
        state = asdict(self.position) | {
            "seed": self.seed,
            "order": self._inner.order,
            "extent": self._inner.extent,
            "set_epoch": self._inner.epochs.in_use,
            "seed_drawn": self._reading.seed_drawn,
        }
        if isinstance(self._inner, Streamed):
            state["dataset"] = self._dataset_state
        return state

    @property
    def _dataset_state(self) -> dict[str, Any] | None:
        return self._inner.state_dict() if self.position.taken else None

    def load_state_dict(self, state_dict: dict[str, Any] | None) -> None:
        """Go on from a position, or with None from the start; ValueError within an epoch of another order."""
        if state_dict is None:
            self.seek(Position())
            return
        position = Position(**{key: state_dict[key] for key in ("epoch", "taken", "padded")})
        for key, here in (("seed", self.seed), ("order", self._inner.order)):
            if position.taken and state_dict[key] != here:
                raise ValueError(
                    f"DataLoader: {key} is {here!r}, but the checkpoint's position was counted with "
                    f"{key} {state_dict[key]!r}"
                )
        self.seek(position)
        self._inner.epochs.in_use, self._reading.seed_drawn = state_dict["set_epoch"], state_dict["seed_drawn"]
        if isinstance(self._inner, Streamed):
            self._inner.state = state_dict["dataset"]
        if position.taken and state_dict["extent"] != self._inner.extent:
            self._misfit = (
                f"the position was counted in {state_dict['extent']}, now there are {self._inner.extent}: in this "
                "epoch some may come twice or not at all"
            )


@dataclass(slots=True)
class _Reading:
    """Which iterator a loader's position follows, and what of it an iteration was trained on."""

    placed: int = 0
    """How often the position was set by `seek`."""
    placed_at: Position = field(default_factory=Position)
    """Where it was set last, by `seek` or when the loader was made."""
    drawing: int = 0
    """Loops of the script's own that are in the middle of an epoch."""
    seed_drawn: bool = False
    followed: bool = False
    """A session calls `iteration_ended`."""
    open: set[object] = field(default_factory=set)
    """Iterators that have given a batch and have not ended."""
    current: object | None = None
    """The open iterator that the position follows."""
    last: object | None = None
    """The iterator that gave the last batch; it may have ended."""
    began: Position = field(default_factory=Position)
    """Where the current iterator began."""
    counted: bool = False
    """The epoch at the position has been trained on: the next iterator begins the next epoch."""
    looked: bool = False
    """An iterator was left early since the last iteration ended, and the position is back where it was."""


def _after(position: Position) -> Position:
    """The beginning of the next epoch."""
    return Position(epoch=position.epoch + 1, padded=position.padded)


def _refuse(
    options: dict[str, Any],
    shuffle: bool,
    sampler: object,
    batch_sampler: object,
    drop_last: bool,
    batch_size: int | None,
) -> None:
    """ValueError for what cannot be meant."""
    if options.pop("generator", None) is not None:
        raise ValueError("DataLoader(generator=...): the order follows from seed; give seed=... instead")
    if not options.get("in_order", True):
        raise ValueError(
            "DataLoader(in_order=False): batches in the order of their arrival have no position; drop it"
        )
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"DataLoader(batch_size={batch_size}): at least 1, or None for single samples")
    if sampler is not None and shuffle:
        raise ValueError("DataLoader(sampler=..., shuffle=True): the sampler decides the order; drop shuffle")
    if batch_sampler is not None and (sampler is not None or shuffle or drop_last or batch_size != 1):
        raise ValueError(
            "DataLoader(batch_sampler=...) decides on batch_size, shuffle, sampler, drop_last; drop them"
        )


def _place_among_ranks(rank: int | None, world_size: int | None) -> tuple[int, int]:
    if rank is None and world_size is None:
        return rank_and_world_size()
    if rank is None or world_size is None or not 0 <= rank < world_size:
        raise ValueError(f"DataLoader(rank={rank}, world_size={world_size}): give both, 0 <= rank < world_size")
    return rank, world_size


def _none_left(why: str) -> Generator[Any, None, str]:
    """An iterator without batches; `why` is the message of its StopIteration."""
    yield from ()
    return why
