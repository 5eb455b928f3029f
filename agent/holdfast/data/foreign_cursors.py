"""Cursors over loaders of other libraries: by their own state, by that of their iterators, or by counting."""

from __future__ import annotations

import inspect
import itertools
import logging
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from holdfast.data.cursor import Cursor
from holdfast.data.generators import GeneratorStates
from holdfast.data.loader import EnclosedLoaders
from holdfast.data.order import stable_hash
from holdfast.data.reachable import incomplete_state, parts_in_process, shared_iterator
from holdfast.state.rng import restore_rng, rng_state
from holdfast.system.preemption import iterate_loader

logger = logging.getLogger("holdfast")

_END = object()
LEAST_BYTES = 64
"""A smaller batch may be equal to the next one by chance."""


def foreign_cursor_over(loader: Iterable[Any]) -> Cursor:
    """Return a cursor for a loader of another library."""
    if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
        lacks = incomplete_state(loader)
        return StatefulCursor(loader) if lacks is None else CountingCursor(loader, lacks)
    if _has_stateful_iterators(loader):
        return StatefulIteratorCursor(loader)
    return CountingCursor(loader)


class LoaderCursor:
    """Base class of cursors over loaders of other libraries."""

    may_be_empty = False
    shared_iterator: str | None = None

    def __init__(self, loader: Any) -> None:
        self._loader, self.epoch = loader, 0

    def why_empty(self) -> str:
        from holdfast.data.empty_epochs import why_empty  # only for an error

        return why_empty(self._loader)

    def leave_out(self, state_dict: dict[str, Any], batches: int) -> dict[str, Any]:
        raise ValueError(f"{type(self._loader).__name__} continues from its own state, which cannot be advanced")


class StatefulCursor(LoaderCursor):
    """Cursor over a loader with its own position, such as torchdata's StatefulDataLoader."""

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self._given, self._begun = 0, False
        self._source: Any = None
        """Iterator of the last epoch."""
        self._loaded: Any = None
        """State of the loader from a checkpoint, until the loader continues from it."""
        # of another class nothing is known: a state of its own may include its generators
        is_known = isinstance(loader, torch.utils.data.DataLoader)
        self._generators = GeneratorStates(**(parts_in_process(loader) if is_known else {}))
        self._generators_start: Mapping[str, Any] = {}
        """States at the start of the epoch: a loader may get to its position by drawing again."""
        self._last: list[str | None] = []
        """Digests of the last batches given."""

    @property
    def continues(self) -> bool:
        return self._given > 0 or self._loaded is not None

    @property
    def limitation(self) -> str | None:
        loader, name = self._loader, type(self._loader).__name__
        if not isinstance(loader, torch.utils.data.DataLoader):
            return f"{name} restores its own position: only {name} determines whether that is exact"
        if not getattr(loader, "in_order", True):
            return f"{name} with in_order=False may repeat or skip batches after a resume: leave in_order=True"
        from holdfast.data.sampler_values import order_drawn_anew  # only for such loaders

        if (what := order_drawn_anew(loader)) is not None:
            return what
        if not loader.num_workers:
            return None
        text = (
            f"{name} restores its own position, not the random state of its {loader.num_workers} workers: random "
            "augmentation in them may differ after a resume"
        )
        if isinstance(loader.dataset, torch.utils.data.IterableDataset):
            return text
        return f"{text}. holdfast.DataLoader takes the same arguments and has no such limit"

    def batches(self) -> Iterator[Any]:
        _set_epoch(self._loader, self.epoch)
        # an unused position at the start of an epoch may be the end of the one before
        between_epochs = self._loaded is not None and not self._given
        now = rng_state()
        if not self._given:
            self._generators_start = self._generators.state_dict()
        states = self._generators.state_dict()
        self._generators.load_state_dict(self._generators_start)
        source = self._source = iterate_loader(self._loader)
        if self._given:
            self._generators.reach(samplers=False)
            restore_rng(now)  # the epoch began before the resume, and drew its numbers then
            if inspect.isgenerator(source) and isinstance(self._loader, torch.utils.data.DataLoader):
                source = self._begun_by_first_batch(source)
        if self._given:
            source = self._not_repeated(source, states)
        self._begun, self._loaded = True, None
        yield from self._counted(source)
        if between_epochs and not self._given:
            # some loaders continue with the next epoch, others give an empty rest first
            restore_rng(now)
            self._source = iterate_loader(self._loader)
            yield from self._counted(self._source)
        self.epoch, self._given, self._last = self.epoch + 1, 0, []

    def state_dict(self) -> dict[str, Any]:
        state = self._loaded
        if state is None and self._begun:
            # an unused loader has no position yet, and might start its workers to return it. The state of
            # StatefulDataLoader is that of its last iterator, which may be one of an evaluation
            owner = self._source if hasattr(type(self._source), "state_dict") else self._loader
            state = owner.state_dict()
            if state is None:
                name = type(self._loader).__name__
                raise TypeError(f"{name}.state_dict() returned None: its position cannot be saved")
        position = {"epoch": self.epoch, "given": self._given, "loader": state}
        generators = {"start": self._generators_start, "now": self._generators.state_dict()}
        return position | {"generators": generators, "last": self._last}

    def load_state_dict(self, state_dict: dict[str, Any] | None) -> None:
        state_dict = state_dict or {"epoch": 0, "given": 0, "loader": None}
        self.epoch, self._given, state = (state_dict[key] for key in ("epoch", "given", "loader"))
        self._loaded = state
        if state is None and self._begun and hasattr(getattr(self._loader, "dataset", None), "next_epoch"):
            # Mosaic's StreamingDataset keeps a position that it loaded until a later epoch begins
            state = self._loader.state_dict() | {"epoch": 0, "sample_in_epoch": 0}
        if state is not None:
            self._loader.load_state_dict(state)
        generators = state_dict.get("generators", {"start": {}, "now": {}})
        self._generators_start = generators["start"]
        self._generators.load_at_position(generators["now"])
        if not self._given:
            self._generators.reach()
        self._last = state_dict.get("last", [])

    def _begun_by_first_batch(self, source: Iterator[Any]) -> Iterator[Any]:
        """Let a loader that draws the seed of its workers with its first batch draw it from another generator."""
        own = self._loader.generator
        self._loader.generator = torch.Generator().manual_seed(stable_hash(self.epoch, self._given) >> 1)
        try:
            first = list(itertools.islice(source, 1))
        finally:
            self._loader.generator = own
        yield from first
        yield from source

    def _counted(self, source: Iterator[Any]) -> Iterator[Any]:
        for batch in source:
            self._given += 1
            self._last = [*self._last[-1:], _digest_of(batch, LEAST_BYTES)]
            yield batch

    def _not_repeated(self, source: Iterator[Any], states: Mapping[str, Any]) -> Iterator[Any]:
        """Warn if the first batch after a resume is the last one before it, unless equal batches are usual.

        Samplers have been read again only when there is a first batch: set what training has changed in them.
        """
        before, first = self._last, list(itertools.islice(source, 1))
        self._generators.go_on(states)
        for batch in first:
            if len({*before, None}) == 3 and before[-1] == _digest_of(batch, LEAST_BYTES):
                logger.warning(
                    "%s gave the same batch before and after the resume: its state_dict is not its exact "
                    "position, and samples of this epoch may occur twice or not at all. Use holdfast.DataLoader",
                    type(self._loader).__name__,
                )
            yield batch
        yield from source


class StatefulIteratorCursor(LoaderCursor):
    """Cursor over a loader whose iterators have the position, as those of Grain do; or over such an iterator."""

    limitation: str | None = None

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self._source: Any = None
        """Iterator of the current epoch, once it has begun."""
        self._loaded: Any = None
        """State from a checkpoint, until an iterator continues from it."""
        self._given: Any = loader if hasattr(loader, "get_state") else None
        """The loader, if it is an iterator: it begins no second epoch."""
        self._start = self._given.get_state() if self._given is not None else None

    @property
    def continues(self) -> bool:
        return self._loaded is not None

    def batches(self) -> Iterator[Any]:
        state, self._loaded = self._loaded, None
        self._source = iter(self._loader)
        if state is not None:
            self._source.set_state(state)
        yield from self._source
        self.epoch, self._source = self.epoch + 1, self._given

    def state_dict(self) -> dict[str, Any]:
        state = self._source.get_state() if self._source is not None else self._loaded
        return {"epoch": self.epoch, "iterator": state}

    def load_state_dict(self, state_dict: dict[str, Any] | None) -> None:
        state_dict = state_dict or {"epoch": 0, "iterator": self._start}
        self.epoch, self._loaded, self._source = state_dict["epoch"], state_dict["iterator"], None


class CountingCursor(LoaderCursor):
    """Cursor over any iterable: a resume starts the epoch again and skips to the position.

    Every `holdfast.DataLoader` that the iterable draws from, and every generator that is reachable from it, goes
    back to the start of the epoch. The count is therefore the only position.
    """

    def __init__(self, loader: Any, lacks: str | None = None) -> None:
        super().__init__(loader)
        self._given, self._lacks = 0, lacks
        """What the state of the loader lacks, which is not used for that reason."""
        self._start: dict[str, Any] | None = None
        """Random state at the start of this epoch, from which a loader that shuffles draws its order."""
        self._generators = GeneratorStates(**parts_in_process(loader))
        self._inner = EnclosedLoaders()
        self._last: list[str | None] = []
        """Digests of the last batches given."""
        self.shared_iterator = shared_iterator(loader)
        self._is_behind = False
        """Whether earlier epochs have yet to be read again, since all of them share one iterator."""

    @property
    def limitation(self) -> str:
        name = type(self._loader).__name__
        text = (
            f"{name} cannot continue from a position: after a resume its epoch is read again from the start up to "
            "the position"
        )
        if self._lacks is not None:
            return f"{text}, since its state_dict lacks {self._lacks}"
        if not isinstance(self._loader, torch.utils.data.DataLoader):
            return f"{text}, in an order that may differ"
        if self._has_persistent_workers:
            text += ", and random augmentation in its persistent workers may differ"
        if self.shared_iterator is not None:
            # an order drawn from the global generators follows from training, which is not repeated
            text += ". It keeps one iterator for all epochs: from the second on, the order may differ"
        return f"{text}. holdfast.DataLoader takes the same arguments and continues at once"

    @property
    def _has_persistent_workers(self) -> bool:
        return bool(getattr(self._loader, "persistent_workers", False))

    @property
    def continues(self) -> bool:
        return self._given > 0

    def batches(self) -> Iterator[Any]:
        source = self._begun_again() if self._given or self._is_behind else self._begun()
        while True:
            with self._inner.drawing():
                batch = next(source, _END)
            if batch is _END:
                break
            self._given += 1
            self._last = [*self._last[-1:], _digest_of(batch)]
            yield batch
        self.epoch, self._given, self._last = self.epoch + 1, 0, []
        if self.shared_iterator is None:
            self._start, self._inner = None, EnclosedLoaders()

    def state_dict(self) -> dict[str, Any]:
        state = {"epoch": self.epoch, "given": self._given, "start": self._start, "last": self._last}
        return state | {"generators": self._generators.state_dict(), "inner": self._inner.starts}

    def leave_out(self, state_dict: dict[str, Any], batches: int) -> dict[str, Any]:
        name, given = type(self._loader).__name__, state_dict["given"]
        if not given:
            raise ValueError(f"{name} has not drawn the order of this epoch yet")
        try:
            left = len(self._loader) - given
        except TypeError:
            raise ValueError(f"{name} has no len(), so the end of the epoch is unknown") from None
        if batches > left:
            raise ValueError(
                f"only {left:,} batches of this epoch are left, and {name} cannot skip past the end of an epoch"
            )
        return state_dict | {"given": given + batches, "last": []}

    def load_state_dict(self, state_dict: dict[str, Any] | None) -> None:
        state_dict = state_dict or {"epoch": 0, "given": 0, "start": None}
        self.epoch, self._given, self._start = (state_dict[key] for key in ("epoch", "given", "start"))
        self._inner = EnclosedLoaders(state_dict.get("inner", ()))
        self._last = state_dict.get("last", [])
        self._is_behind = self.shared_iterator is not None and self.epoch > 0
        self._generators.load_at_position(state_dict.get("generators"))
        if not (self._given or self._is_behind):
            self._generators.reach()

    def _begun(self) -> Iterator[Any]:
        if self._start is None:
            self._start = rng_state() | {"generators": self._generators.state_dict()}
        _set_epoch(self._loader, self.epoch)
        with self._inner.drawing():
            return iterate_loader(self._loader)

    def _begun_again(self) -> Iterator[Any]:
        """Begin the epoch, and read it up to the position."""
        now, start, began = rng_state(), self._start, time.perf_counter()
        assert start is not None
        restore_rng(start)
        self._generators.load_state_dict(start.get("generators", {}))
        try:
            with self._inner.drawing():
                for _ in range(self.epoch if self._is_behind else 0):
                    _pass_over(iterate_loader(self._loader), sys.maxsize)
                self._is_behind = False
                source = self._begun()
                _pass_over(source, self._given - len(self._last))
                random_state = rng_state()
                last = [_digest_of(batch) for batch in itertools.islice(source, len(self._last))]
            # noise from the global generators is other noise here, since training draws none in between
            is_comparable = _are_equal(random_state, rng_state()) and not self._has_persistent_workers
        finally:
            restore_rng(now)
            self._generators.reach()
        name, seconds = type(self._loader).__name__, time.perf_counter() - began
        logger.info("read %d batches of %s again in %.1f s to reach the checkpoint", self._given, name, seconds)
        if len(last) < len(self._last) or (is_comparable and last != self._last):
            logger.warning(
                "%s gave different batches when it was read again up to the position: samples may occur twice or "
                "not at all in this epoch",
                name,
            )
        return source


def _pass_over(source: Iterator[Any], count: int) -> None:
    for _ in itertools.islice(source, count):
        pass


def _are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return all(_are_equal(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return all(map(_are_equal, one, other))
    return bool(one == other)


def _digest_of(batch: Any, least_bytes: int = 0) -> str | None:
    from holdfast.data.digests import digest_of  # only for loaders whose position is counted

    return digest_of(batch, least_bytes)


def _set_epoch(loader: Any, epoch: int) -> None:
    """Set the epoch of a loader and its parts, as a script with its own loop would."""
    for part in (loader, *(getattr(loader, name, None) for name in ("sampler", "batch_sampler", "dataset"))):
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)
        elif hasattr(part, "next_epoch"):  # Mosaic's StreamingDataset counts epochs from the start of the process
            part.next_epoch = epoch


def _has_stateful_iterators(loader: Any) -> bool:
    """Whether a loader is one of Grain, or an iterator with `get_state` and `set_state`, as those of Grain."""
    if hasattr(loader, "get_state") and hasattr(loader, "set_state"):
        return True
    grain = sys.modules.get("grain")  # a loader of Grain has imported it
    return grain is not None and isinstance(loader, (grain.DataLoader, grain.MapDataset, grain.IterDataset))
