"""The decision at the boundary after an iteration, as a pure function of its inputs."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from holdfast.engine.coordination import Decision, RestoreTarget
from holdfast.pacing.profile import SnapshotMode

FACTOR = 1.5
"""Allowance for a final checkpoint over the usual duration: many jobs may be preempted at once."""


@dataclass(slots=True)
class Requests:
    """Requests that wait for a decision, which clears them."""

    checkpoint: bool = False
    """Requested by the script or an operator, whatever the interval."""
    restore: str | None = None
    """The checkpoint that the script restores."""
    retry: bool = False
    """The last copy was torn: take another at once, while training waits."""


class Situation(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs of a decision: what is requested and what is possible at a boundary."""

    lineage: int = 1
    end_requested: bool = False
    """A rank has received SIGTERM."""
    grace_left_seconds: float = 0.0
    checkpoint_seconds: float | None = None
    """Usual time from the boundary until a checkpoint is durable; None while nothing was measured."""
    restore: RestoreTarget | None = None
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
    spread_seconds: float = 0.0
    """The time over which the bytes are written; 0: at full speed."""
    call_due: bool = False
    """All ranks are to call what an integration has registered."""


def decide(now: Situation) -> Decision:
    """An end comes before a restore, and a restore before a checkpoint.

    A checkpoint that is due waits some iterations rather than stall training: for memory to be allocated, or for
    the one before it to be written. One that was requested, or is taken again, waits for room only.
    """
    if now.end_requested:
        takes = now.checkpoint_seconds  # one of which nothing is known is tried: half of it does no harm
        fits = takes is None or FACTOR * takes <= now.grace_left_seconds
        return Decision(end=True, checkpoint="final" if fits else None, at_once=True, lineage=now.lineage)
    if now.restore is not None:
        return Decision(restore=now.restore)
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
        over_seconds=0.0 if now.retry else now.spread_seconds,
        lineage=now.lineage,
        call=now.call_due,
    )
