"""The decision at a boundary between two iterations, and its coordination: all ranks act on the same one.

Rank 0 decides. At one boundary it broadcasts the decision for a later one, usually the next, so that the message
travels while the iteration runs and no rank waits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import msgspec

from holdfast.distributed.ranks import Ranks
from holdfast.pacing.policy import SnapshotMode
from holdfast.protocol.orders import HaltAction
from holdfast.protocol.wire import CheckpointKind, DataSkip

AGREE_EVERY_SECONDS = 0.1
"""Interval between two broadcasts where iterations are shorter."""
FACTOR = 1.5
"""Allowance for a final checkpoint over the usual duration: many jobs may be preempted at once."""


class RestoreTarget(msgspec.Struct, frozen=True):
    """What to restore."""

    checkpoint: str = ""
    order: str | None = None
    """`None` where the script requests the restore."""
    degraded: bool = False
    """As for `restore.load`."""
    skip: DataSkip | None = None
    """Data to leave out."""
    trouble: int | None = None
    """First iteration with a wrong loss, where the rule `on_trouble` requests the restore."""


class Halt(msgspec.Struct, frozen=True):
    """How to halt training, and who asked for it."""

    action: HaltAction
    by: str = ""
    order: str | None = None
    """Id of the order; `None` where the rule `on_trouble` asks for it, whose state is not worth a checkpoint."""


class ValueSetting(NamedTuple):
    """A change of a value, in numbers that fit into an announcement."""

    name: int
    kind: int
    """-1: no value changes."""
    bits: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to do at a boundary; by default nothing."""

    checkpoint: CheckpointKind | None = None
    at_once: bool = False
    """Training waits for the copy."""
    mode: SnapshotMode = "cpu"
    lineage: int = 0
    """The lineage of rank 0."""
    restore: RestoreTarget | None = None
    """A placeholder on ranks other than 0, which learn the target when they restore."""
    halt: Halt | None = None
    """Without its author on ranks other than 0, which report nothing."""
    end: bool = False
    """A rank has received SIGTERM: all ranks end here, after the checkpoint."""
    waits: bool = False
    """A checkpoint is due, but cannot begin yet."""
    call: bool = False
    """Every rank calls its `CollectiveCall`."""
    value: ValueSetting | None = None
    """A value changes, before anything else is done here."""

    def __bool__(self) -> bool:
        acts = (self.checkpoint, self.restore, self.halt, self.value)
        return any(each is not None for each in acts) or self.end or self.call


class CollectiveCall(Protocol):
    """What an integration does on all ranks at the same boundary."""

    def is_due(self, *, at_end: bool) -> bool:
        """Return whether all ranks are to make the call at the next boundary, or now at the end of training.

        Asked on rank 0 only, which clears the reason for the call when it makes it.
        """
        ...

    def __call__(self) -> None: ...


class BoundaryCoordinator:
    """Coordinator of a job with one rank: every boundary asks `choose`."""

    def __init__(self, choose: Callable[[int], Decision]) -> None:
        self._choose = choose

    def begin(self, iteration: int) -> None:
        """Begin to coordinate, on all ranks, after this iteration."""

    def decision(self, iteration: int) -> Decision:
        """Return what to do at the boundary after `iteration`."""
        return self._choose(iteration)

    def look_ahead(self, iteration: int) -> None:
        """Agree on the next decision; call it when this boundary is done."""

    def may_act_after(self, iteration: int) -> bool | None:
        """Return whether that boundary may act; `None` leaves it to pacing."""
        return None

    def end(self, iteration: int) -> bool:
        """End training on this rank; return whether all ranks may take a final checkpoint."""
        return True


class DetachedCoordinator(BoundaryCoordinator):
    """Coordinator of a rank that has lost the others: it decides nothing."""

    def __init__(self) -> None:
        super().__init__(lambda _: Decision())

    def may_act_after(self, iteration: int) -> bool | None:
        return False

    def end(self, iteration: int) -> bool:
        return False


def coordinator_for(ranks: Ranks, choose: Callable[[int], Decision]) -> BoundaryCoordinator:
    if ranks.world_size == 1:
        return BoundaryCoordinator(choose)
    from holdfast.engine.rank_coordination import rank_coordinator

    return rank_coordinator(ranks, choose)


@dataclass(slots=True)
class Requests:
    """Requests that wait for a decision, which clears them."""

    checkpoint: bool = False
    """Requested by the script or an operator, whatever the interval."""
    restore: RestoreTarget | None = None
    """What the script restores."""
    retry: bool = False
    """The last copy was torn: take another at once, while training waits."""
    probe: bool = False
    """An operator wants to know how fast data can be loaded."""


class Situation(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs of a decision: what is requested and what is possible at a boundary."""

    lineage: int = 1
    end_requested: bool = False
    """A rank has received SIGTERM."""
    grace_left_seconds: float = 0.0
    checkpoint_seconds: float | None = None
    """Usual time from the boundary until a checkpoint is durable; None while nothing was measured."""
    restore: RestoreTarget | None = None
    halt: Halt | None = None
    requested: bool = False
    retry: bool = False
    due: bool = False
    """The pacing controller wants a checkpoint after this iteration."""
    withheld: bool = False
    """An operator's settings have kept the job from checkpoints for too long."""
    memory_ready: bool = True
    """Memory for the copy is allocated, or training has waited long enough for that."""
    has_room: bool = True
    """A snapshot may begin: fewer than `max_in_flight` are in memory."""
    in_flight: int = 0
    """Checkpoints that are being copied or written."""
    max_in_flight: int = 1
    """How many the pacing controller allows at the same time."""
    mode: SnapshotMode = "cpu"
    call_due: bool = False
    """All ranks are to call what an integration has registered."""


def decide(now: Situation) -> Decision:
    """An end comes before a restore, a restore before a halt, and a halt before a checkpoint.

    A checkpoint that is due waits some iterations rather than stall training: for memory to be allocated, or for
    the one before it to be written. One that was requested, or is taken again, waits for room only.
    """
    if now.end_requested:
        takes = now.checkpoint_seconds  # one of which nothing is known is tried: half of it does no harm
        fits = takes is None or FACTOR * takes <= now.grace_left_seconds
        return Decision(end=True, checkpoint="final" if fits else None, at_once=True, lineage=now.lineage)
    if now.restore is not None:
        return Decision(restore=now.restore)
    if now.halt is not None:
        return Decision(halt=now.halt, lineage=now.lineage)
    urgent = now.requested or now.retry
    if not (urgent or now.due or now.withheld):
        return Decision(call=now.call_due)
    can_wait = not urgent and (not now.memory_ready or now.in_flight >= now.max_in_flight)
    if can_wait or not now.has_room:
        return Decision(waits=True, call=now.call_due)
    return Decision(
        checkpoint="requested" if now.requested else "scheduled",
        at_once=now.retry,
        mode=now.mode,
        lineage=now.lineage,
        call=now.call_due,
    )
