"""How several ranks agree on the decision at a boundary: rank 0 broadcasts it ahead, as numbers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import get_args

import msgspec
import torch
import torch.distributed as dist

from holdfast.distributed.ranks import Ranks, RanksLost
from holdfast.distributed.side_group import SideGroup, warn_while_waiting
from holdfast.engine.coordination import (
    AGREE_EVERY_SECONDS,
    BoundaryCoordinator,
    Decision,
    Halt,
    RestoreTarget,
    ValueSetting,
)
from holdfast.pacing.policy import SnapshotMode
from holdfast.protocol.orders import HaltAction
from holdfast.protocol.wire import CheckpointKind

logger = logging.getLogger("holdfast")

MOST_ITERATIONS = 64
"""Most iterations between two broadcasts."""
END_SECONDS = 60.0
"""How long a rank that has ended waits for the others: one may be waiting for it in a collective."""
KINDS: tuple[CheckpointKind, ...] = get_args(CheckpointKind)
MODES: tuple[SnapshotMode, ...] = get_args(SnapshotMode)
HALTS: tuple[HaltAction, ...] = get_args(HaltAction)
NUMBERS = 13


def rank_coordinator(ranks: Ranks, choose: Callable[[int], Decision]) -> BoundaryCoordinator:
    """Return the coordinator of one of several ranks."""
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
                f"this rank has finished iteration {iteration:,}, and rank 0 {done} iteration {self._at:,}: every "
                "rank must call session.step() equally often"
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


NO_VALUE = ValueSetting(0, -1, 0)


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
        -1 if decision.halt is None else HALTS.index(decision.halt.action),
        *(decision.value or NO_VALUE),
    ]
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def _decoded(numbers: torch.Tensor) -> tuple[int, Decision, bool]:
    at, restore, kind, at_once, mode, lineage, ended, end, call, halt, *setting = numbers.tolist()
    value = ValueSetting(*setting)
    decision = Decision(
        checkpoint=None if kind < 0 else KINDS[kind],
        at_once=bool(at_once),
        mode=MODES[mode],
        lineage=lineage,
        restore=RestoreTarget() if restore else None,
        halt=None if halt < 0 else Halt(HALTS[halt]),
        end=bool(end),
        call=bool(call),
        value=None if value == NO_VALUE else value,
    )
    return at, decision, bool(ended)
