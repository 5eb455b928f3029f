"""The ranks of a job: rank and world size of this process, and how they reach common decisions."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from holdfast.errors import HoldfastError

T = TypeVar("T")


class RanksLost(HoldfastError):
    """Another rank has ended or does not respond."""


def rank_and_world_size() -> tuple[int, int]:
    """Return them from torch.distributed if initialized, else from RANK and WORLD_SIZE if set, else (0, 1)."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return 0, 1


class Ranks:
    """The only rank of a job; the base class of `SideGroup`."""

    rank, world_size = 0, 1
    key = ""
    """Prefix of keys in the store of torch.distributed."""

    @property
    def leads(self) -> bool:
        """This is rank 0, which decides, polls the server and writes manifests."""
        return self.rank == 0

    def decide(self, question: Callable[[], T], kind: Any) -> T:
        """Call `question` on rank 0; return its result, of type `kind`, or raise its error on all ranks."""
        return question()

    def run_on_all(self, work: Callable[[], T]) -> T:
        """Call `work` on every rank; if it fails on any, raise the error of the lowest such rank on all."""
        return work()

    def gather(self, data: bytes) -> list[bytes]:
        """Return the data that every rank passes, by rank."""
        return [data]

    def request_exit(self) -> None:
        """Notify rank 0 that this rank received SIGTERM."""

    @property
    def is_exit_requested(self) -> bool:
        """Return whether any rank has requested an exit; polled by rank 0."""
        return False

    def report_trouble(self, lineage: int, iteration: int) -> None:
        """Notify rank 0 that the loss of this rank is wrong from `iteration` of a lineage on."""

    def reported_trouble(self, lineage: int) -> int | None:
        """Return the first iteration that other ranks have reported for a lineage; polled by rank 0."""
        return None

    def close(self) -> None: ...


def join() -> Ranks:
    """Return the ranks of this job; collective if there are several.

    Raises:
        ValueError: there are several, and torch.distributed is not initialized.
    """
    rank, world_size = rank_and_world_size()
    if world_size == 1:
        return Ranks()
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            f"holdfast.Session: this is rank {rank} of {world_size} (RANK, WORLD_SIZE); call "
            "torch.distributed.init_process_group before creating it, or unset both variables if the processes "
            "train independently"
        )
    from holdfast.distributed.side_group import SideGroup  # only with several ranks

    return SideGroup()
