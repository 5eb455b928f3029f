"""Cursors: epochs of batches from any loader; their position, and that of training, which checkpoints hold."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

import msgspec

from holdfast.errors import DamagedCheckpoint
from holdfast.format.manifest import MANIFEST

if TYPE_CHECKING:
    from holdfast.data.loader import DataLoader


def is_dataloader(item: object) -> TypeGuard[DataLoader]:
    """Return whether an object is a `holdfast.DataLoader`; without one, its modules are not loaded."""
    module = sys.modules.get("holdfast.data.loader")
    return isinstance(item, getattr(module, "DataLoader", ()))


def cursor_over(loader: Iterable[Any]) -> Cursor:
    """Return a cursor for any loader."""
    if is_dataloader(loader):
        return loader
    from holdfast.data.foreign_cursors import foreign_cursor_over  # a loader that is not ours

    return foreign_cursor_over(loader)


def loaders_within(loader: Iterable[Any], given: Mapping[str, Any]) -> list[str]:
    """Return the keywords under which the script gave loaders that an iterable draws from."""
    if is_dataloader(loader):
        return []
    from holdfast.data.reachable import given_within

    return given_within(loader, given)


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


LEAVE_OUT = "leave_out"
"""Key in the position of a loader: how many batches to leave out when the loader gets there."""


class BatchesAnIteration(msgspec.Struct, frozen=True):
    """How many batches each iteration up to the current one has taken."""

    batches: int = 0
    """0: not known."""
    since: int = 0
    """The iteration after which all have taken that number, on this number of ranks."""

    @classmethod
    def saved(cls, session: Mapping[str, Any], iteration: int) -> BatchesAnIteration:
        """Return what the session's state of a checkpoint says."""
        batches = session.get("batches_an_iteration") or 0
        return cls(batches, session.get("batches_counted_from", 0 if batches else iteration))


def require_position(trees: Mapping[str, Any]) -> None:
    """Raise DamagedCheckpoint if a checkpoint has no position or no random state."""
    session = trees.get("session")
    kinds = {"loaders": list, "loader": int, "controller": dict}
    if not isinstance(session, dict) or not all(isinstance(session.get(key), kind) for key, kind in kinds.items()):
        raise DamagedCheckpoint(MANIFEST, "missing or invalid position in training")
    if not isinstance(trees.get("rng"), dict):
        raise DamagedCheckpoint(MANIFEST, "missing or invalid random state")
