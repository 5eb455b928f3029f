"""The resumable loader. The order of samples is a pure function of (seed, epoch), the position a number.

One module, since users read its only class as one document.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self

import torch
from torch.utils.data import BatchSampler, Dataset, IterableDataset, RandomSampler, SequentialSampler

from holdfast.data.indexed import DataPosition, IndexedBatches, IndexOrder
from holdfast.data.loader_arguments import arguments_of, place_among_ranks, refuse
from holdfast.data.loader_position import LoaderPosition, after
from holdfast.data.order import RankShare, stable_hash

if TYPE_CHECKING:
    from holdfast.data.sampled import SamplerOrder
    from holdfast.data.streams import StreamedBatches


class ResumableLoader(Protocol):
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class EnclosedLoaders:
    """The loaders that one epoch of a counted iterable draws from, in the order in which it began them.

    `starts` are their positions at that time. When the epoch is read again, each begins there: its own position,
    as restored from a checkpoint, already includes what is read again.
    """

    def __init__(self, starts: Iterable[dict[str, Any]] = ()) -> None:
        self.starts = list(starts)
        self._begun: list[ResumableLoader] = []

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """Record the loaders that begin to give batches within the block, on this thread."""
        token = _enclosing.set(self)
        try:
            yield
        finally:
            _enclosing.reset(token)

    def is_replayed(self, loader: ResumableLoader) -> bool:
        """Whether the loader has yet to begin where it began before."""
        return len(self._begun) < len(self.starts) and not any(each is loader for each in self._begun)

    def begin(self, loader: ResumableLoader) -> None:
        """Record where a loader begins, or have it begin there again."""
        if self.is_replayed(loader):
            loader.load_state_dict(self.starts[len(self._begun)])
        elif any(each is loader for each in self._begun):
            return
        else:
            self.starts.append(loader.state_dict())
        self._begun.append(loader)


_enclosing: ContextVar[EnclosedLoaders | None] = ContextVar("enclosing", default=None)


def enclosing() -> EnclosedLoaders | None:
    """Return the counted iterable that draws now, on this thread."""
    return _enclosing.get()


logger = logging.getLogger("holdfast")

_HOW_TO_COUNT = "loop over the loader, or over range(loader.batches_left(loader.epoch + 1))"


class DataLoader(LoaderPosition):
    """A loader with the arguments of `torch.utils.data.DataLoader` that can continue from any position.

    Args:
        dataset: map-style, or iterable. An iterable dataset with a state_dict that is read in this process
            continues from its state; any other is read again from its start, up to the position.
        batch_size: samples per batch, on each rank.
        shuffle: draw a new permutation every epoch, from (seed, epoch).
        seed: seed of the permutations and of the random numbers used while a sample is read.
        sampler, batch_sampler: as in torch. They are iterated with random generators seeded from (seed, epoch).
            Call their `set_epoch` as with torch's loader; `session.batches` calls it for you, with epochs from 0,
            unless the script does.
        rank, world_size: this loader's part of the global order. Default: those of torch.distributed if it is
            initialized, else RANK and WORLD_SIZE, else everything. A sampler with `rank` and `num_replicas`, such
            as DistributedSampler, splits the samples itself; an iterable dataset must.
        tail: how to handle a last iteration with too few samples for all ranks, unless drop_last drops it. "pad":
            all ranks get equally many, and up to world_size - 1 samples occur twice, which `padded` counts.
            "short": every sample occurs once. Some ranks get one sample fewer; if fewer samples than ranks are
            left, some end the epoch an iteration early, which DistributedDataParallel needs its `join` for.
        **options: num_workers, collate_fn, pin_memory, persistent_workers … as in torch.

    An iteration takes the next batch_size × world_size samples of the global order. The position counts the
    samples of finished iterations on all ranks, so it is valid for any number of ranks and workers and any batch
    size.

    Each `iter()` begins an epoch at its first batch, as in torch. The first one after a resume gives the rest of
    the checkpoint's epoch, which is empty after the last batch. An epoch ends with its last batch, or when the
    loop leaves it after a `session.step`. Batches drawn without training on them, as by `next(iter(loader))`, are
    given again. Without a session that counts iterations, each `iter()` takes a new epoch.

    A sample is read with generators of Python, NumPy and torch (CPU) seeded from (seed, epoch, index). A batch is
    collated, or read by `__getitems__`, with those seeded from its first sample. Other attributes are those of the
    torch loader inside.

    Raises:
        ValueError: arguments that exclude each other, as in torch; or `generator`, which `seed` replaces.
    """

    watched_by: ClassVar[list[weakref.WeakSet[DataLoader]]] = []
    """One set per open session, of loaders that gave a batch since it last looked, to warn of unknown ones."""

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
        refuse(options, shuffle, sampler, batch_sampler, drop_last, batch_size)
        super().__init__()
        self.dataset, self.seed = dataset, seed
        self._given_sampler, self._given_batch_sampler, self._shuffle = sampler, batch_sampler, shuffle
        self.batch_size, self.drop_last = (None if batch_sampler is not None else batch_size), drop_last
        self.rank, self.world_size = place_among_ranks(rank, world_size)
        if tail not in ("pad", "short"):
            raise ValueError(f"DataLoader(tail={tail!r}): give 'pad' or 'short'")
        # a private generator: instead of torch, _draw_base_seed draws from the global one, once per epoch
        options["generator"] = torch.Generator().manual_seed(stable_hash(seed, "loader") >> 1)
        if isinstance(dataset, IterableDataset):
            options |= {"batch_size": batch_size, "drop_last": drop_last, "shuffle": shuffle}
            options |= {"sampler": sampler, "batch_sampler": batch_sampler}  # so that torch refuses them
        share = RankShare(
            rank=self.rank,
            world_size=self.world_size,
            batch_size=self.batch_size or 1,
            tail="drop" if drop_last else tail,
        )
        self._inner = self._batches_of(options, share)
        self.collate_fn, self._tail = self._inner.collate_fn, tail
        self._mismatch: str | None = None
        self.lookahead = 0
        """Number of batches that the caller draws in advance, as some frameworks do; they count as not drawn."""
        self._used_state: dict[str, Any] | None = None
        self._used_generators: Mapping[str, Any] | None = None
        """States of the dataset and of generators at `position`, with `lookahead`."""
        self.last_position: DataPosition | None = None
        """Position after the last batch of the epoch that ended last."""

    def _batches_of(self, options: dict[str, Any], share: RankShare) -> IndexedBatches | StreamedBatches:
        dataset, seed, by_batch = self.dataset, self.seed, self._given_batch_sampler is not None
        if isinstance(dataset, IterableDataset):
            from holdfast.data.streams import StreamedBatches

            return StreamedBatches(dataset, seed, options, self.world_size)
        source = self._given_batch_sampler if by_batch else self._given_sampler
        order: IndexOrder | SamplerOrder
        if source is None:
            order = IndexOrder(dataset, seed, self._shuffle)
        else:
            from holdfast.data.sampled import SamplerOrder

            order = SamplerOrder(source, seed)
        return IndexedBatches(dataset, order, share, seed, options, batch_size=self.batch_size, by_batch=by_batch)

    @classmethod
    def from_torch(cls, loader: torch.utils.data.DataLoader[Any], **arguments: Any) -> Self:
        """Return a loader with the dataset, the sampler and the options of a loader of torch.

        `arguments` replace its own, as in `seed=1`. If it shuffles, the order is another one: that of `seed`, else
        of its generator's seed, else of 0. Raises TypeError for a loader that cannot continue from a position.
        """
        return cls(**arguments_of(loader) | arguments)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "dataset" and "dataset" in vars(self):
            raise ValueError(
                "DataLoader: the dataset cannot be replaced after construction, as with torch's loader: construct "
                "another loader"
            )
        super().__setattr__(name, value)

    @property
    def epoch(self) -> int:
        """The current epoch, from 0. It advances when a loop gets no more batch or begins the next epoch."""
        return self.position.epoch

    @property
    def padded(self) -> int:
        """Samples given twice so far to give all ranks equally many; batches with a batch_sampler."""
        return self.position.padded

    @property
    def limitation(self) -> str | None:
        """Guarantees that this loader cannot give, as text."""
        return "; ".join(filter(None, (self._mismatch, self._inner.limitation))) or None

    @property
    def sampler(self) -> Any:
        """The given sampler; else one as torch's loader has, which describes the order but is not used."""
        if self._given_sampler is not None:
            return self._given_sampler
        if not isinstance(self._inner, IndexedBatches):
            return self._inner.loader.sampler
        return (RandomSampler if self._shuffle else SequentialSampler)(self.dataset)  # type: ignore[arg-type]

    @property
    def batch_sampler(self) -> Any:
        """The given sampler; else one as torch's loader has, which describes the batches but is not used."""
        if self._given_batch_sampler is not None or self.batch_size is None:
            return self._given_batch_sampler
        return BatchSampler(self.sampler, self.batch_size, self.drop_last)

    def __len__(self) -> int:
        """Batches in a whole epoch, on this rank."""
        return len(self._inner)

    def batches_left(self, epochs: int) -> int:
        """Batches left of `epochs` epochs in total, on this rank.

        Raises:
            TypeError: the dataset or the sampler has no length.
        """
        if self.epoch >= epochs:
            return 0
        return self._inner.left(self.position) + (epochs - self.epoch - 1) * len(self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._inner.loader, name)

    @property
    def repeats_evaluation(self) -> bool:
        """Whether it evaluates, and each pass is known to give the same, so that no position matters."""
        inner, samplers = self._inner, (self._given_sampler, self._given_batch_sampler)
        is_same = isinstance(inner, IndexedBatches) and inner.draws_nothing and not self._shuffle
        trains = self.is_iterated_directly or self._iterators.with_gradients
        return is_same and samplers == (None, None) and not trains

    def __iter__(self) -> Iterator[Any]:
        """Iterate over an epoch from its first batch; the first time after a resume, over the rest of it.

        If a restore changes the position meanwhile, the iterator continues from there.
        """
        if not self._goes_on:  # as in torch, before the first batch is requested
            self._draw_base_seed()
        elif self._has_no_batch_left and not (
            self._is_evaluation or self._iterators.gives_to_session or enclosing()
        ):
            logger.info(
                "the checkpoint was taken after the last batch of epoch %d: this loop over the loader gets no "
                "batch, and the next one begins epoch %d",
                *(self.epoch, self.epoch + 1),
            )
            ended = f"epoch {self.epoch} had no batch left after the resume"
            self._inner.pass_over(self.position)
            self.position = after(self.position)
            return self._none_left(f"{ended}: {_HOW_TO_COUNT}")
        resumed = f"epoch {self.epoch} had fewer batches left after the resume than a whole epoch: {_HOW_TO_COUNT}"
        return self._by_hand(resumed if self._goes_on else None)

    def batches(self) -> Iterator[Any]:
        """Iterate over the rest of the epoch, for `session.batches`, which decides on the next epoch."""
        iterator = object()
        if not self.position.taken:
            self._draw_base_seed()
        self._iterators.trained_on, self._iterators.left_untrained = True, False
        try:
            yield from self._batches(iterator, by_hand=False)
        finally:
            if self._iterators.current is iterator:
                self._iterators.current, self._iterators.trained_on = None, False

    def _none_left(self, why: str) -> Generator[Any, None, str | None]:
        """Yield no batch; `why` is the message of its StopIteration."""
        if (within := enclosing()) is not None and within.is_replayed(self):
            return (yield from self._by_hand(None))
        return why

    def _by_hand(self, why_short: str | None) -> Generator[Any, None, str | None]:
        """Yield the batches of the script's own loop; `why_short` is the message of its StopIteration."""
        state, within, is_evaluation = self._iterators, enclosing(), self._is_evaluation
        iterator = object()
        if state.unused_rest:
            self._warn_once(
                "partial pass",
                "the first loop over the loader after the resume finished no iteration. It got only the rest of "
                f"epoch {self.epoch}, which the next loop gets again: its result differs from that of a first "
                "start. Compute it before session.resume(), or with another loader",
            )
            state.unused_rest = False
        before = state.current, self.position, state.began, state.trained_on
        dataset_state = self._dataset_state
        if state.trained_on and state.has_session and state.current is None and not is_evaluation and not within:
            self._warn_once(
                "left early",
                f"the loop over the loader left epoch {self.epoch} early, and the next one begins epoch "
                f"{self.epoch + 1}: a resume from the last checkpoint of epoch {self.epoch} would first give the "
                "rest of it. Use session.batches(loader, epochs=None), or a sampler that makes epochs shorter",
            )
        is_within_epoch = state.current is not None and state.began.taken > 0  # which a resume continued
        if state.trained_on or is_within_epoch or (is_evaluation and self.position.taken):
            self.position = after(self.position)
        elif state.current is not None:
            self.position = state.began
        if within is not None:
            within.begin(self)
        seeks, first = state.seek_count, self.position
        state.trained_on, state.left_untrained = not state.has_session or within is not None, False
        state.drawing += within is None
        try:
            yield from self._batches(iterator, by_hand=True)
        finally:
            state.drawing -= within is None
            if state.current is iterator:
                state.current = None
                if state.trained_on and self._is_complete():
                    self.position = after(self.position)
                ended, interrupted = not self.position.taken, before[0] in state.open
                is_rest = first.taken > 0 and ended and not interrupted and not is_evaluation
                is_short = is_rest and self._is_shorter_than_an_iteration(first)
                if state.trained_on or seeks != state.seek_count or is_short:
                    state.trained_on = state.trained_on and not ended
                else:  # no batch was used for training: back to the interrupted iterator, or to the beginning
                    state.current, self.position, state.began, state.trained_on = before
                    self._set_dataset_state(dataset_state)
                    if not interrupted:
                        state.current, state.left_untrained, state.unused_rest = None, not is_evaluation, is_rest
        return why_short

    def _is_shorter_than_an_iteration(self, first: DataPosition) -> bool:
        """Whether the pass from here to the end of the epoch had fewer batches than an iteration uses."""
        if self._iterators.gives_to_session:
            return False
        most, last = self._iterators.taken_per_iteration, self.last_position
        return most is None or last is None or last.taken - first.taken < most

    def _batches(self, iterator: object, *, by_hand: bool) -> Iterator[Any]:
        """Yield the batches from `position` to the end of its epoch; follow a restore to another position."""
        state = self._iterators
        state.open.add(iterator)
        try:
            state.current = state.last = iterator
            state.began = began = start = used = self.position
            seeks, again = state.seek_count, True
            ahead: deque[tuple[DataPosition, dict[str, Any] | None, Mapping[str, Any]]] = deque()
            while again:
                again = False
                ahead.clear()
                trains = not state.has_session or state.trains_with_gradients is not None
                self._inner.epochs.begin(start.epoch, begun=start.taken > 0, by_hand=by_hand, trains=trains)
                self._inner.generators.is_ahead = bool(self.lookahead or self.num_workers)
                self._inner.generators.is_by_hand = by_hand
                self._used_generators = self._inner.generators.continued() if self.lookahead else None
                for position, batch in self._inner.batches(start):
                    start = position
                    if self.lookahead:
                        ahead.append((position, self._inner.state_dict(), self._inner.generators.continued()))
                        if len(ahead) > self.lookahead:
                            used, self._used_state, self._used_generators = ahead.popleft()
                            self.position = used
                    else:
                        self.position = used = position
                    if enclosing() is None:
                        for drawn in DataLoader.watched_by:
                            drawn.add(self)
                    state.drawn += by_hand and not self.lookahead and enclosing() is None
                    state.with_gradients = torch.is_grad_enabled()
                    yield batch
                    if seeks != state.seek_count:
                        seeks, again = state.seek_count, True
                        start = used = self.position
                        state.current = state.last = iterator
                        if not start.taken:
                            self._draw_base_seed()
                        break
                    if state.last is not iterator:  # another iterator gave a batch meanwhile
                        self._take_back(iterator, began, used)
                        if again := self._inner.exclusive:
                            break
            self.last_position, self.position = start, after(start)
        finally:
            state.open.discard(iterator)

    def _take_back(self, iterator: object, began: DataPosition, position: DataPosition) -> None:
        """Make the position follow this iterator again."""
        if self._iterators.current not in (None, iterator):
            self._iterators.trained_on = True
            self._warn_once(
                "two loops",
                "two loops use one holdfast.DataLoader in turn: both may give the same epoch, and a checkpoint "
                "holds only the position of the one used last; create a loader for each",
            )
        self._iterators.current = self._iterators.last = iterator
        self._iterators.began, self.position = began, position

    def _set_dataset_state(self, state: dict[str, Any] | None) -> None:
        self._inner.state = state

    @property
    def _has_no_batch_left(self) -> bool:
        return isinstance(self._inner, IndexedBatches) and self._is_complete()

    @property
    def may_be_empty(self) -> bool:
        """Whether an epoch may have no batch on this rank, although others get some."""
        return self._tail == "short" and self.world_size > 1

    @property
    def shared_iterator(self) -> str | None:
        """Describe why this loader cannot begin an epoch again in this process, if it cannot."""
        return self._inner.shared_iterator

    def why_empty(self) -> str:
        """Describe why an epoch has no batch."""
        from holdfast.data.empty_epochs import why_empty  # only for an error

        return why_empty(self)

    def _is_complete(self) -> bool:
        """Whether the last batch of the epoch has been given; `False` if the length is unknown."""
        try:
            return self.position.taken > 0 and self._inner.left(self.position) == 0
        except Exception:  # a dataset or a sampler without a length
            return False

    def _draw_base_seed(self) -> None:
        """Draw from the global generator what torch's loader draws when it begins to iterate.

        Persistent workers take their seed once.
        """
        if not self.persistent_workers or not self._iterators.seed_drawn:
            torch.empty((), dtype=torch.int64).random_()
            self._iterators.seed_drawn = True

    def second_loader(
        self, batches: int, around: Callable[[Dataset[Any]], Dataset[Any]], timeout_seconds: float
    ) -> torch.utils.data.DataLoader[Any] | None:
        """Return a loader of the next batches that no worker has been given yet, which this one still gives.

        `around` wraps the dataset. `None` for an iterable dataset, which cannot be read ahead.
        """
        if not isinstance(self._inner, IndexedBatches):
            return None
        return self._inner.second_loader(self._inner.upcoming(self.position, batches), around, timeout_seconds)

    def seek(self, position: DataPosition) -> None:
        """Continue from this position, which may be within an epoch."""
        state = self._iterators
        self.position, state.set_position, self._mismatch = position, position, None
        state.current, state.trained_on, state.left_untrained, state.unused_rest = None, False, False, False
        state.seek_count += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the position: a few numbers, and the state of an iterable dataset."""
        state = asdict(self.position) | {
            "seed": self.seed,
            "order": self._inner.order,
            "extent": self._inner.extent,
            "set_epoch": self._inner.epochs.in_use,
            "seed_drawn": self._iterators.seed_drawn,
            "gradients": self._iterators.trains_with_gradients,
            "taken_per_iteration": self._iterators.taken_per_iteration,
        }
        if not isinstance(self._inner, IndexedBatches):
            state["dataset"] = self._dataset_state
        begun = self.position.taken > 0
        generators = self._inner.generators.state_dict(self.epoch, begun=begun, continued=self._used_generators)
        return state | ({"generators": generators} if any(generators.values()) else {})

    @property
    def _dataset_state(self) -> dict[str, Any] | None:
        if not self.position.taken:
            return None
        return self._used_state if self.lookahead else self._inner.state_dict()

    def begin_next_epoch(self) -> None:
        """Go to the start of the next epoch, unless the current one has not begun."""
        if self.position.taken:
            self.load_state_dict(self.state_dict() | {"epoch": self.epoch + 1, "taken": 0, "dataset": None})

    def leave_out(self, state_dict: dict[str, Any], batches: int) -> dict[str, Any]:
        """Return the state so many batches after the position in `state_dict`, without training on them.

        Raises:
            ValueError: this loader cannot get there exactly.
        """
        start = DataPosition(**{key: state_dict[key] for key in ("epoch", "taken", "padded")})
        end = self._inner.leave_out(start, batches)
        generators = state_dict.get("generators", {})
        if end.epoch != start.epoch and (generators.get("repeated") or generators.get("values")):
            raise ValueError("its sampler continues from epoch to epoch, so no epoch can be skipped")
        # the epochs that begin meanwhile draw their seeds, as torch's loader does; one at its start has yet to
        begins = end.epoch - start.epoch + (not start.taken) - (not end.taken)
        known = {} if end.epoch == start.epoch else {"set_epoch": None}
        return state_dict | asdict(end) | known | {"seeds_to_draw": state_dict.get("seeds_to_draw", 0) + begins}

    def load_state_dict(self, state_dict: dict[str, Any] | None) -> None:
        """Continue from a position; `None` for the start. ValueError within an epoch of another order."""
        if state_dict is None:
            self.seek(DataPosition())
            self._iterators.trains_with_gradients = self._used_generators = None
            self._inner.generators.load_state_dict(None, 0, begun=False)
            return
        position = DataPosition(**{key: state_dict[key] for key in ("epoch", "taken", "padded")})
        for key, here in (("seed", self.seed), ("order", self._inner.order)):
            if position.taken and state_dict[key] != here:
                raise ValueError(
                    f"DataLoader: {key} is {here!r}, but the checkpoint's position is for {key} "
                    f"{state_dict[key]!r}"
                )
        self.seek(position)
        self._iterators.counted = position
        self._iterators.taken_per_iteration = state_dict.get("taken_per_iteration")
        self._inner.epochs.in_use, self._iterators.seed_drawn = state_dict["set_epoch"], state_dict["seed_drawn"]
        for _ in range(state_dict.get("seeds_to_draw", 0)):
            self._draw_base_seed()
        self._iterators.trains_with_gradients, self._used_generators = state_dict.get("gradients"), None
        self._inner.generators.load_state_dict(
            state_dict.get("generators"), position.epoch, begun=position.taken > 0
        )
        if not isinstance(self._inner, IndexedBatches):
            self._inner.state = self._used_state = state_dict["dataset"]
        if position.taken and state_dict["extent"] != self._inner.extent:
            self._mismatch = (
                f"the checkpoint was taken with {state_dict['extent']}, and now there are {self._inner.extent}: "
                "in this epoch some may occur twice or not at all"
            )
