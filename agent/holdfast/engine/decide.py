"""What to do at the boundary after an iteration: a pure function of everything that has a say in it."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from holdfast.engine.coordination import Decision, RestoreTarget
from holdfast.pacing.profile import SnapshotMode

FACTOR = 1.5
"""How much longer than usual a last checkpoint may take: it may be written while many jobs are being preempted."""


NOTHING = Decision()


@dataclass(slots=True)
class Requests:
    """Requests that wait for a decision; each is cleared when it was decided on."""

    checkpoint: bool = False
    """The script or an operator requests a checkpoint whatever the interval."""
    restore: str | None = None
    """The checkpoint that the script goes back to."""
    retry: bool = False
    """The last copy was torn: take another one at once, while training waits."""


class Situation(msgspec.Struct, frozen=True, kw_only=True):
    """What is wanted and what is possible at the boundary after an iteration."""

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
    """A snapshot may begin: fewer than `slots` are in memory."""
    in_flight: int = 0
    """Checkpoints that are being copied or written."""
    max_in_flight: int = 1
    """How many the pacing controller allows at the same time."""
    mode: SnapshotMode = "cpu"
    spread_seconds: float = 0.0
    """The time over which the bytes are written; 0: at full speed."""


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
        return NOTHING
    can_wait = not urgent and (not now.memory_ready or now.in_flight >= now.max_in_flight)
    if can_wait or not now.has_room:
        return Decision(waits=True)
    return Decision(
        checkpoint="requested" if now.requested else "scheduled",
        at_once=now.retry,
        mode=now.mode,
        over_seconds=0.0 if now.retry else now.spread_seconds,
        lineage=now.lineage,
    )
