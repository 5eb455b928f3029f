"""The work of a script since the last boundary between two iterations."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class UnfinishedIteration:
    """What the script has done since the last iteration ended."""

    batches: int = 0
    """Number drawn from `session.batches`."""
    updates: int = 0
    """Number of optimizer steps."""

    @property
    def is_empty(self) -> bool:
        return not (self.batches or self.updates)
