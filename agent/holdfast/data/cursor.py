"""The data side of a loop: epochs of batches from any loader, and a position that can be saved and set."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch

from holdfast.data.loader import DataLoader
from holdfast.state.rng import restore_rng, rng_state
from holdfast.system.preemption import begun


class Cursor(Protocol):
    """What `session.batches` draws from."""

    @property
    def gap(self) -> str | None:
        """The promise that this loader cannot keep, in words, if there is one."""
        ...

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


def cursor_over(loader: Iterable[Any]) -> Cursor:
    """A cursor for any loader."""
    if isinstance(loader, DataLoader):
        return loader
    if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
        return _StatefulCursor(loader)
    return _CountingCursor(loader)


class _StatefulCursor:
    """A loader that keeps its own position, such as torchdata's StatefulDataLoader."""

    def __init__(self, loader: Any) -> None:
        self._loader, self.epoch, self._given = loader, 0, 0
        self._begun = self._loaded = False
        self.gap = (
            f"{type(loader).__name__} keeps its own position, and what that promises is its own: with workers "
            "random augmentation may differ after a resume. holdfast.DataLoader takes the same arguments"
        )

    def batches(self) -> Iterator[Any]:
        _set_epoch(self._loader, self.epoch)
        resumed, self._begun = self._given, True
        now = rng_state()
        source = begun(self._loader)
        if resumed:
            restore_rng(now)  # the epoch began before, and what beginning it draws was drawn then
        yield from self._counted(source)
        if self._loaded and not resumed and not self._given:
            # some go on from the end of an epoch with the next one, others end there again
            yield from self._counted(begun(self._loader))
        self.epoch, self._given, self._loaded = self.epoch + 1, 0, False

    def state_dict(self) -> dict[str, Any]:
        # one never drawn from has nothing to say yet, and may start its workers to say it
        state = self._loader.state_dict() if self._begun else None
        return {"epoch": self.epoch, "given": self._given, "loader": state}

    def load_state_dict(self, state_dict: dict[str, Any] | None) -> None:
        state_dict = state_dict or {"epoch": 0, "given": 0, "loader": None}
        self.epoch, self._given = state_dict["epoch"], state_dict["given"]
        if state_dict["loader"] is not None:
            self._loader.load_state_dict(state_dict["loader"])
            self._begun = self._loaded = True

    def _counted(self, source: Iterator[Any]) -> Iterator[Any]:
        for batch in source:
            self._given += 1
            yield batch


class _CountingCursor:
    """Any iterable: its epoch is started again, as it was, and read up to where training stood."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader, self.epoch, self._given = loader, 0, 0
        self._start: dict[str, Any] | None = None
        """The random state in which this epoch was begun: a loader that shuffles draws its order from it."""

    @property
    def gap(self) -> str:
        name = type(self._loader).__name__
        text = (
            f"{name} cannot go on from a position: after a resume its epoch is read again from the start up to "
            "where training stood"
        )
        if not isinstance(self._loader, torch.utils.data.DataLoader):
            return f"{text}, in an order that may differ"
        if self._loader.generator is not None:
            text += ", in an order that may differ, since its generator is not checkpointed"
        elif self._loader.num_workers and self._loader.persistent_workers:
            text += ", and random augmentation in its persistent workers may differ"
        return f"{text}. holdfast.DataLoader takes the same arguments and goes on at once"

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
        return begun(self._loader)

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


def _set_epoch(loader: Any, epoch: int) -> None:
    """As the loop would do itself, had it drawn from the loader directly."""
    for part in (loader, *(getattr(loader, name, None) for name in ("sampler", "batch_sampler", "dataset"))):
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)
