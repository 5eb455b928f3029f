"""Who this process is among those of its job."""

from __future__ import annotations

import os

import torch.distributed


def rank_and_world_size() -> tuple[int, int]:
    """From torch.distributed where it is set up, else from RANK and WORLD_SIZE where both are, else (0, 1)."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return 0, 1


def require_single_process() -> None:
    """ValueError when there are several ranks: their agreement on one checkpoint is not built yet."""
    _, world_size = rank_and_world_size()
    if world_size > 1:
        raise ValueError(
            f"holdfast.Session: this job runs {world_size} ranks; this version checkpoints jobs of one process"
        )
