"""Loaders that another iterable draws from, such as those in `zip(a, b)`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any, Protocol


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
