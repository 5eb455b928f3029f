"""What is to be done at the boundary between two iterations, at the same one on all ranks of a job.

Rank 0 decides. It tells the others at a boundary what is to be done at a later one, the next as a rule: while that
iteration runs the word gets round, and nobody waits for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

import msgspec
import torch
import torch.distributed as dist

from holdfast.distributed.ranks import Ranks, RanksLost, SideGroup, told_while_waiting
from holdfast.pacing.profile import SnapshotMode
from holdfast.protocol.messages import CheckpointKind

logger = logging.getLogger("holdfast")

MEETING_SECONDS = 0.1
"""Ranks that train in quick iterations hear of each other about so often."""
MOST_ITERATIONS = 64
"""... but at least once in so many."""
END_SECONDS = 60.0
"""A rank that has ended waits no longer for the others: one of them may be waiting for it, in a collective."""
KINDS: tuple[CheckpointKind, ...] = get_args(CheckpointKind)
MODES: tuple[SnapshotMode, ...] = get_args(SnapshotMode)
NUMBERS = 9
RestoreTarget = tuple[str, str | None]
"""A checkpoint to go back to, and the order that asks for it; None: the script does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A checkpoint, or a restore; by itself: nothing."""

    checkpoint: CheckpointKind | None = None
    at_once: bool = False
    """Training waits for the copy."""
    mode: SnapshotMode = "cpu"
    over_seconds: float = 0.0
    """Over which its bytes are written."""
    lineage: int = 0
    """The one that rank 0 is on."""
    restore: RestoreTarget | None = None
    """On ranks other than 0 a placeholder: they learn the target when it comes to that."""
    end: bool = False
    """Somebody told a rank to end: all do, here, after the checkpoint."""
    waits: bool = False
    """Nothing, since what is due cannot be done yet."""

    def __bool__(self) -> bool:
        return self.checkpoint is not None or self.restore is not None or self.end


class BoundaryCoordinator:
    """Of a job with one rank: whatever `choose` says of the boundary after an iteration."""

    def __init__(self, choose: Callable[[int], Decision]) -> None:
        self._choose = choose

    def begin(self, iteration: int) -> None:
        """Training goes on from here, on all ranks."""

    def decision(self, iteration: int) -> Decision:
        """What to do at the boundary after `iteration`."""
        return self._choose(iteration)

    def look_ahead(self, iteration: int) -> None:
        """To be called when what was decided of this boundary is done."""

    def may_act_after(self, iteration: int) -> bool | None:
        """Whether something may be decided of that boundary; None: as the pacing has it."""
        return None

    def end(self, iteration: int) -> bool:
        """Training has ended on this rank; whether all ranks may take a last checkpoint, after this iteration."""
        return True


class DetachedCoordinator(BoundaryCoordinator):
    """Of a rank that has lost the others: nothing is decided any more."""

    def __init__(self) -> None:
        super().__init__(lambda _: Decision())

    def may_act_after(self, iteration: int) -> bool | None:
        return False

    def end(self, iteration: int) -> bool:
        return False


def steering_of(ranks: Ranks, choose: Callable[[int], Decision]) -> BoundaryCoordinator:
    return DistributedCoordinator(ranks, choose) if isinstance(ranks, SideGroup) else BoundaryCoordinator(choose)


class DistributedCoordinator(BoundaryCoordinator):
    """Of one of several ranks.

    Raises:
        RanksLost: another rank is gone, or does not count iterations as this one does. There are no further
            decisions.
    """

    def __init__(self, ranks: SideGroup, choose: Callable[[int], Decision]) -> None:
        super().__init__(choose)
        self._ranks = ranks
        self._numbers = torch.zeros(NUMBERS, dtype=torch.int64, device="cpu")
        self._word: dist.Work | None = None
        """On its way, or unheard."""
        self._at = 0
        """The boundary that the last word is of."""
        self._next = Decision()
        self._ended = False
        """The last word is that rank 0 has ended."""
        self._met = (0, 0.0)
        """When the ranks last met: the iteration, and the time."""

    def begin(self, iteration: int) -> None:
        self._met = iteration, time.perf_counter()
        self._announce(iteration)

    def decision(self, iteration: int) -> Decision:
        if self._word is not None:
            self._hear()
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
        return self._word is not None or iteration == self._at

    def end(self, iteration: int) -> bool:
        rank, patience = self._ranks.rank, f"{END_SECONDS:.0f} s"
        told = f"rank {rank} has ended; for a last checkpoint it waits for the other ranks, up to {patience}"
        with (
            told_while_waiting(told),
            self._ranks.within(
                END_SECONDS,
                f"the other ranks have not ended within {patience} of this one: do all of them call "
                "session.step() equally often?",
            ),
        ):
            if self._ranks.leads:
                self._tell_end(iteration)
            else:
                self._hear_end(iteration)
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

    def _tell_end(self, iteration: int) -> None:
        if self._word is not None:
            self._hear()
        self._ranks.heard(self._ranks.announce(_encoded(iteration, Decision(), ended=True)))

    def _hear_end(self, iteration: int) -> None:
        """What rank 0 said at this boundary or before; then it says that it has ended, or has trained on."""
        if self._word is not None:
            self._hear()
        if not self._ended:
            self._announce(iteration)
            self._hear()
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
        self._word = self._ranks.announce(self._numbers)

    def _hear(self) -> None:
        assert self._word is not None
        word, self._word = self._word, None
        self._ranks.heard(word)
        if not self._ranks.leads:
            self._at, self._next, self._ended = _decoded(self._numbers)

    def _chosen(self, iteration: int) -> tuple[int, Decision]:
        """The next boundary at which there is something to do, or to be told."""
        (before, then), now = self._met, time.perf_counter()
        self._met = iteration, now
        each_seconds = (now - then) / max(1, iteration - before)
        ahead = min(max(1, int(MEETING_SECONDS / max(each_seconds, 1e-9))), MOST_ITERATIONS)
        if before == iteration:
            ahead = 1  # nothing is known of them yet
        try:
            for later in range(iteration + 1, iteration + ahead + 1):
                if decision := self._choose(later):
                    return later, decision
                if decision.waits:  # asked again when the ranks can still do it there
                    return max(iteration + 1, later - 1), Decision()
        except Exception:  # the others wait for a word, whatever it is
            logger.exception("nothing is decided after iteration %d", iteration)
        return iteration + ahead, Decision()


def _encoded(at: int, decision: Decision, *, ended: bool = False) -> torch.Tensor:
    numbers = [
        at,
        int(decision.restore is not None),
        -1 if decision.checkpoint is None else KINDS.index(decision.checkpoint),
        int(decision.at_once),
        MODES.index(decision.mode),
        round(decision.over_seconds * 1e6),
        decision.lineage,
        int(ended),
        int(decision.end),
    ]
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def _decoded(numbers: torch.Tensor) -> tuple[int, Decision, bool]:
    at, restore, kind, at_once, mode, over, lineage, ended, end = numbers.tolist()
    decision = Decision(
        checkpoint=None if kind < 0 else KINDS[kind],
        at_once=bool(at_once),
        mode=MODES[mode],
        over_seconds=over / 1e6,
        lineage=lineage,
        restore=("", None) if restore else None,
        end=bool(end),
    )
    return at, decision, bool(ended)
