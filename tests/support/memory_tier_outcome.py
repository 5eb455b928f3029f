"""The outcome of a run under a supervisor with a memory tier."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from holdfast.checkpoint import restore
from holdfast.store import open_store
from tests.support.job_processes import LedgerStep


@dataclass
class MemoryTierOutcome:
    status: int
    log: str
    steps: list[LedgerStep]
    store: Path

    @property
    def resumed_at(self) -> list[int]:
        """The iteration that each start but the first went on from."""
        pids = list(dict.fromkeys(step.pid for step in self.steps))
        return [min(step.iteration for step in self.steps if step.pid == pid) - 1 for pid in pids[1:]]

    @property
    def from_memory(self) -> list[int]:
        """The iterations that starts went on from in memory."""
        return [int(found) for found in re.findall(r"resumed from iteration (\d+) \(kept in memory", self.log)]

    @property
    def rescued(self) -> list[int]:
        return [int(found) for found in re.findall(r"saved iteration (\d+) from memory", self.log)]

    @property
    def attempts(self) -> dict[int, int]:
        """Which attempt committed each checkpoint, by iteration; all of them are sound."""
        store = open_store(self.store)
        manifests = [restore.verify(store, "tier", checkpoint) for checkpoint in store.checkpoints("tier")]
        return {manifest.iteration: manifest.attempt for manifest in manifests}


def assert_nothing_left(supervisor: int) -> None:
    """Assert that no process holds memory of this supervisor."""
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            assert f"holdfast-{supervisor}-" not in os.readlink(link), link
        except OSError:
            continue
