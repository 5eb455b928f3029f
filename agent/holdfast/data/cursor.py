"""Cursors: epochs of batches from any loader, with a position that can be saved and restored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

from holdfast.data.loader import DataLoader


def cursor_over(loader: Iterable[Any]) -> Cursor:
    """Return a cursor for any loader."""
    if isinstance(loader, DataLoader):
        return loader
    from holdfast.data.foreign_cursors import foreign_cursor_over  # a loader that is not ours

    return foreign_cursor_over(loader)


class Cursor(Protocol):
    """Source of batches of `session.batches`."""

    @property
    def epoch(self) -> int:
        """Number of the current epoch; it advances at the end of an epoch."""

    @property
    def limitation(self) -> str | None:
        """Description of the guarantees that the loader cannot give; `None` if it gives all."""

    @property
    def continues(self) -> bool:
        """Whether the current epoch has given batches before, so that it may have none left."""

    @property
    def may_be_empty(self) -> bool:
        """Whether an epoch without a batch is no error."""

    @property
    def shared_iterator(self) -> str | None:
        """Why the loader cannot begin an epoch again in this process; `None` if it can."""

    def why_empty(self) -> str:
        """Describe why an epoch has no batch at all."""

    def batches(self) -> Iterator[Any]:
        """Iterate over the rest of the current epoch."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch given."""

    def leave_out(self, state_dict: dict[str, Any], batches: int) -> dict[str, Any]:
        """Return the state `batches` batches after `state_dict`. ValueError if the loader cannot get there."""

    def load_state_dict(self, state_dict: dict[str, Any] | None) -> None:
        """Go to a position, or to the start for `None`."""


def require_leaving_out(state_dict: Mapping[str, Any]) -> None:
    """Raise ValueError if the loader whose position this is cannot leave batches out, whatever its length."""
    if "taken" not in state_dict and "start" not in state_dict:
        raise ValueError("it continues from its own state, which cannot be advanced")
