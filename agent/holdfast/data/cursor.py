"""Cursors: epochs of batches from any loader, with a position that can be saved and restored."""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from holdfast.data.loader import DataLoader
from holdfast.data.order import stable_hash
from holdfast.state.rng import restore_rng, rng_state
from holdfast.system.preemption import iterate_loader


def cursor_over(loader: Iterable[Any]) -> Cursor:
    """Return a cursor for any loader."""
    if isinstance(loader, DataLoader):
        return loader
    if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
        return _StatefulCursor(loader)
    if _has_stateful_iterators(loader):
        return _StatefulIteratorCursor(loader)
    return _CountingCursor(loader)


class _StatefulCursor:
    """Cursor over a loader with its own position, such as torchdata's StatefulDataLoader."""

    def __init__(self, loader: Any) -> None:
        self._loader, self.epoch, self._given = loader, 0, 0
        self._begun = False
        self._loaded: Any = None
        """State of the loader from a checkpoint, until the loader continues from it."""

    @property
    def limitation(self) -> str | None:
        loader, name = self._loader, type(self._loader).__name__
        if not isinstance(loader, torch.utils.data.DataLoader):
            return f"{name} restores its own position: whether it is the exact one depends on {name} alone"
        if not getattr(loader, "in_order", True):
            return f"{name} with in_order=False may repeat or skip batches after a resume: leave in_order=True"
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
        source = iterate_loader(self._loader)
        if self._given:
            restore_rng(now)  # the epoch began before the resume, and drew its numbers then
            if inspect.isgenerator(source) and isinstance(self._loader, torch.utils.data.DataLoader):
                source = self._begun_by_first_batch(source)
        self._begun, self._loaded = True, None
        yield from self._counted(source)
        if between_epochs and not self._given:
            # some loaders continue with the next epoch, others give an empty rest first
            restore_rng(now)
            yield from self._counted(iterate_loader(self._loader))
        self.epoch, self._given = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        state = self._loaded
        if state is None and self._begun:
            # an unused loader has no position yet, and might start its workers to return it
            state = self._loader.state_dict()
            if state is None:
                name = type(self._loader).__name__
                raise TypeError(f"{name}.state_dict() returned None: its position cannot be saved")
        return {"epoch": self.epoch, "given": self._given, "loader": state}

    def load_state_dict(self, state_dict: dict[str, Any] | None) -> None:
        state_dict = state_dict or {"epoch": 0, "given": 0, "loader": None}
        self.epoch, self._given, state = (state_dict[key] for key in ("epoch", "given", "loader"))
        self._loaded = state
        if state is None and self._begun and hasattr(getattr(self._loader, "dataset", None), "next_epoch"):
            # Mosaic's StreamingDataset keeps a position that it loaded until a later epoch begins
            state = self._loader.state_dict() | {"epoch": 0, "sample_in_epoch": 0}
        if state is not None:
            self._loader.load_state_dict(state)

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
            yield batch


class _StatefulIteratorCursor:
    """Cursor over a loader whose iterators have the position, as those of Grain do; or over such an iterator."""

    limitation: str | None = None

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader, self.epoch = loader, 0
        self._source: Any = None
        """Iterator of the current epoch, once it has begun."""
        self._loaded: Any = None
        """State from a checkpoint, until an iterator continues from it."""
        self._given: Any = loader if hasattr(loader, "get_state") else None
        """The loader, if it is an iterator: it begins no second epoch."""
        self._start = self._given.get_state() if self._given is not None else None

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


class _CountingCursor:
    """Cursor over any iterable: a resume starts the epoch again and skips to the position."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader, self.epoch, self._given = loader, 0, 0
        self._start: dict[str, Any] | None = None
        """Random state at the start of this epoch, from which a loader that shuffles draws its order."""

    @property
    def limitation(self) -> str:
        name = type(self._loader).__name__
        text = (
            f"{name} cannot continue from a position: after a resume its epoch is read again from the start up to "
            "the position"
        )
        if not isinstance(self._loader, torch.utils.data.DataLoader):
            return f"{text}, in an order that may differ"
        if self._loader.generator is not None:
            text += ", in an order that may differ, since its generator is not checkpointed"
        elif self._loader.num_workers and self._loader.persistent_workers:
            text += ", and random augmentation in its persistent workers may differ"
        return f"{text}. holdfast.DataLoader takes the same arguments and continues at once"

    def batches(self) -> Iterator[Any]:
        for batch in self._begun_again() if self._given else self._begun():
            self._given += 1
            yield batch
        self.epoch, self._given, self._start = self.epoch + 1, 0, None

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "given": self._given, "start": self._start}

    def load_state_dict(self, state_dict: dict[str, Any] | None) -> None:
        state_dict = state_dict or {"epoch": 0, "given": 0, "start": None}
        self.epoch, self._given, self._start = (state_dict[key] for key in ("epoch", "given", "start"))

    def _begun(self) -> Iterator[Any]:
        self._start = rng_state()
        _set_epoch(self._loader, self.epoch)
        return iterate_loader(self._loader)

    def _begun_again(self) -> Iterator[Any]:
        now, start = rng_state(), self._start
        assert start is not None
        restore_rng(start)
        try:
            source = self._begun()
            for _ in itertools.islice(source, self._given):
                pass
        finally:
            restore_rng(now)
        return source


Cursor = DataLoader | _StatefulCursor | _StatefulIteratorCursor | _CountingCursor
"""Source of batches of `session.batches`.

`batches` iterates over the rest of the current epoch; `epoch` advances at its end. `state_dict` returns the
position after the last batch given, and `load_state_dict` goes to one, or to the start for `None`. `limitation`
names the guarantees that the loader cannot give."""


def _has_stateful_iterators(loader: Any) -> bool:
    """Whether a loader is one of Grain, or an iterator with `get_state` and `set_state`, as those of Grain."""
    if hasattr(loader, "get_state") and hasattr(loader, "set_state"):
        return True
    grain = sys.modules.get("grain")  # a loader of Grain has imported it
    return grain is not None and isinstance(loader, (grain.DataLoader, grain.MapDataset, grain.IterDataset))


def _set_epoch(loader: Any, epoch: int) -> None:
    """Set the epoch of a loader and its parts, as a script with its own loop would."""
    for part in (loader, *(getattr(loader, name, None) for name in ("sampler", "batch_sampler", "dataset"))):
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)
        elif hasattr(part, "next_epoch"):  # Mosaic's StreamingDataset counts epochs from the start of the process
            part.next_epoch = epoch
