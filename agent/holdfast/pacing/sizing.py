"""A profile made of what is known before anything runs: the size of the state, bandwidths, iteration time."""

from __future__ import annotations

from dataclasses import dataclass

from .profile import Profile

BYTES_PER_PARAMETER = 14.0
"""Mixed precision with Adam: 2 for the weight, 4 for its float32 copy, 4 for each of two moments."""
COPY_BYTES_PER_SECOND = 10e9
"""From a GPU to pinned host memory over PCIe, with room for what else goes that way."""
WRITE_BYTES_PER_SECOND = 500e6
ITERATION_SECONDS = 1.0
INTERFERENCE = 0.05
"""The share by which training is slower while a checkpoint is copied and written, where nobody has measured it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """What is to be trained, and on what. The ranks share the state, and copy and write their parts at once."""

    state_bytes: float
    """Of the whole job: parameters, optimizer, all that a checkpoint holds."""
    ranks: int = 1
    copy_bytes_per_second: float = COPY_BYTES_PER_SECOND
    """Of one rank, device to host."""
    write_bytes_per_second: float = WRITE_BYTES_PER_SECOND
    """Of one rank, until durable."""
    iteration_seconds: float = ITERATION_SECONDS
    cost_seconds: float | None = None
    """What a checkpoint costs training, where that is known."""
    durable_seconds: float | None = None
    """From the snapshot until it is durable, where that is known."""


def profile_of(sizing: Sizing) -> Profile:
    """What measuring might find.

    Without a known cost, a checkpoint costs what of its copy does not fit beside an iteration, and slows training
    down by `INTERFERENCE` while it is on its way.
    """
    share = sizing.state_bytes / sizing.ranks
    snapshot = share / sizing.copy_bytes_per_second
    persist = share / sizing.write_bytes_per_second
    if sizing.durable_seconds is not None:
        snapshot = min(snapshot, sizing.durable_seconds)
        persist = sizing.durable_seconds - snapshot
    cost = sizing.cost_seconds
    if cost is None:
        cost = max(0.0, snapshot - sizing.iteration_seconds) + INTERFERENCE * (snapshot + persist)
    return Profile(
        iteration_seconds=sizing.iteration_seconds,
        snapshot_seconds=snapshot,
        persist_seconds=persist,
        checkpoint_bytes=round(sizing.state_bytes),
        cost_seconds=cost,
    )
