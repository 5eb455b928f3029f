"""What a checkpoint holds of the position in training, in addition to the positions of loaders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from holdfast.errors import DamagedCheckpoint
from holdfast.format.manifest import MANIFEST

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

    def after(self, iteration: int, batches: int) -> BatchesAnIteration:
        """Return what is known after an iteration that took so many."""
        return self if batches == self.batches else BatchesAnIteration(batches, iteration - 1)


def require_position(trees: Mapping[str, Any]) -> None:
    """Raise DamagedCheckpoint if a checkpoint has no position or no random state."""
    session = trees.get("session")
    kinds = {"loaders": list, "loader": int, "controller": dict}
    if not isinstance(session, dict) or not all(isinstance(session.get(key), kind) for key, kind in kinds.items()):
        raise DamagedCheckpoint(MANIFEST, "missing or invalid position in training")
    if not isinstance(trees.get("rng"), dict):
        raise DamagedCheckpoint(MANIFEST, "missing or invalid random state")
