"""The decision at a boundary between two iterations, and its coordination: all ranks act on the same one.

Rank 0 decides. At one boundary it broadcasts the decision for a later one, usually the next, so that the message
travels while the iteration runs and no rank waits for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, get_args

import msgspec
import torch
import torch.distributed as dist

from holdfast.distributed.ranks import Ranks, RanksLost, SideGroup, warn_while_waiting
from holdfast.pacing.profile import SnapshotMode
from holdfast.protocol.wire import CheckpointKind, DataSkip

logger = logging.getLogger("holdfast")

AGREE_EVERY_SECONDS = 0.1
"""Interval between two broadcasts where iterations are shorter."""
MOST_ITERATIONS = 64
"""Most iterations between two broadcasts."""
END_SECONDS = 60.0
"""How long a rank that has ended waits for the others: one may be waiting for it in a collective."""
KINDS: tuple[CheckpointKind, ...] = get_args(CheckpointKind)
MODES: tuple[SnapshotMode, ...] = get_args(SnapshotMode)
NUMBERS = 9
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
    end: bool = False
    """A rank has received SIGTERM: all ranks end here, after the checkpoint."""
    waits: bool = False
    """A checkpoint is due, but cannot begin yet."""
    call: bool = False
    """Every rank calls its `CollectiveCall`."""

    def __bool__(self) -> bool:
        return self.checkpoint is not None or self.restore is not None or self.end or self.call


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
    return DistributedCoordinator(ranks, choose) if isinstance(ranks, SideGroup) else BoundaryCoordinator(choose)


class DistributedCoordinator(BoundaryCoordinator):
    """Coordinator of one of several ranks.

    Raises:
        RanksLost: another rank is gone, or counts other iterations. There are no further decisions.
    """

    def __init__(self, ranks: SideGroup, choose: Callable[[int], Decision]) -> None:
        super().__init__(choose)
        self._ranks = ranks
        self._numbers = torch.zeros(NUMBERS, dtype=torch.int64, device="cpu")
        self._announcement: dist.Work | None = None
        """A broadcast that is not received yet."""
        self._at = 0
        """The boundary that the last broadcast is about."""
        self._next = Decision()
        self._ended = False
        """Rank 0 has ended, says the last broadcast."""
        self._last_agreement = (0, 0.0)
        """Iteration and time of the last broadcast."""

    def begin(self, iteration: int) -> None:
        self._last_agreement = iteration, time.perf_counter()
        self._announce(iteration)

    def decision(self, iteration: int) -> Decision:
        if self._announcement is not None:
            self._receive_announcement()
        if self._ended or iteration > self._at:
            done = "has ended after" if self._ended else "decided for"
            raise RanksLost(
                f"this rank has finished iteration {iteration:,}, and rank 0 {done} iteration {self._at:,}: "
                "every rank has to call session.step() equally often"
            )
        return self._next if iteration == self._at else Decision()

    def look_ahead(self, iteration: int) -> None:
        if iteration == self._at:
            self._announce(iteration)

    def may_act_after(self, iteration: int) -> bool | None:
        return self._announcement is not None or iteration == self._at

    def end(self, iteration: int) -> bool:
        rank, patience = self._ranks.rank, f"{END_SECONDS:.0f} s"
        message = f"rank {rank} has ended; it waits up to {patience} for the other ranks, for a final checkpoint"
        with (
            warn_while_waiting(message),
            self._ranks.time_limit(
                END_SECONDS,
                f"the other ranks have not ended within {patience} of this one: do all of them call "
                "session.step() equally often?",
            ),
        ):
            if self._ranks.leads:
                self._announce_end(iteration)
            else:
                self._receive_end(iteration)
            ends = [
                msgspec.msgpack.decode(data, type=int)
                for data in self._ranks.gather(msgspec.msgpack.encode(iteration))
            ]
        if any(end != iteration for end in ends):
            raise RanksLost(
                f"the ranks have ended after different iterations ({', '.join(f'{end:,}' for end in ends)}): "
                "every rank has to call session.step() equally often"
            )
        return True

    def _announce_end(self, iteration: int) -> None:
        if self._announcement is not None:
            self._receive_announcement()
        self._ranks.wait_for(self._ranks.start_broadcast(_encoded(iteration, Decision(), ended=True)))

    def _receive_end(self, iteration: int) -> None:
        """Receive whether rank 0 has ended or trains on."""
        if self._announcement is not None:
            self._receive_announcement()
        if not self._ended:
            self._announce(iteration)
            self._receive_announcement()
        if not self._ended:
            raise RanksLost(
                f"this rank has ended after iteration {iteration:,}, and rank 0 trains on: "
                "every rank has to call session.step() equally often"
            )

    def _announce(self, iteration: int) -> None:
        if self._ranks.leads:
            self._at, self._next = self._chosen(iteration)
            self._numbers = _encoded(self._at, self._next)
        else:
            self._at = -1  # not known yet
        self._announcement = self._ranks.start_broadcast(self._numbers)

    def _receive_announcement(self) -> None:
        assert self._announcement is not None
        work, self._announcement = self._announcement, None
        self._ranks.wait_for(work)
        if not self._ranks.leads:
            self._at, self._next, self._ended = _decoded(self._numbers)

    def _chosen(self, iteration: int) -> tuple[int, Decision]:
        """Choose the next boundary to act or to broadcast at."""
        (before, then), now = self._last_agreement, time.perf_counter()
        self._last_agreement = iteration, now
        each_seconds = (now - then) / max(1, iteration - before)
        ahead = min(max(1, int(AGREE_EVERY_SECONDS / max(each_seconds, 1e-9))), MOST_ITERATIONS)
        if before == iteration:
            ahead = 1  # no measurement yet
        try:
            for later in range(iteration + 1, iteration + ahead + 1):
                if decision := self._choose(later):
                    return later, decision
                if decision.waits:  # ask again while the ranks can still act there
                    return max(iteration + 1, later - 1), Decision()
        except Exception:  # the other ranks wait for a broadcast
            logger.exception("no decision after iteration %d", iteration)
        return iteration + ahead, Decision()


def _encoded(at: int, decision: Decision, *, ended: bool = False) -> torch.Tensor:
    numbers = [
        at,
        int(decision.restore is not None),
        -1 if decision.checkpoint is None else KINDS.index(decision.checkpoint),
        int(decision.at_once),
        MODES.index(decision.mode),
        decision.lineage,
        int(ended),
        int(decision.end),
        int(decision.call),
    ]
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def _decoded(numbers: torch.Tensor) -> tuple[int, Decision, bool]:
    at, restore, kind, at_once, mode, lineage, ended, end, call = numbers.tolist()
    decision = Decision(
        checkpoint=None if kind < 0 else KINDS[kind],
        at_once=bool(at_once),
        mode=MODES[mode],
        lineage=lineage,
        restore=RestoreTarget() if restore else None,
        end=bool(end),
        call=bool(call),
    )
    return at, decision, bool(ended)


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
        lineage=now.lineage,
        call=now.call_due,
    )
