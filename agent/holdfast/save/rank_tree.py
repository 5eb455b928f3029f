"""The tree along which ranks exchange messages about a checkpoint.

Eight consecutive ranks, which a launcher starts on one host, send theirs to the first of them; eight such leaders
to the first of these, and so on up to rank 0. So each rank exchanges messages with few others, however many there
are.
"""

from __future__ import annotations

FAN_IN = 8
"""Ranks of a group, with its leader."""


def parent_of(rank: int) -> int:
    """Return the leader that a rank other than 0 sends its messages to."""
    span = FAN_IN
    while rank % span == 0:
        span *= FAN_IN
    return rank - rank % span


def children_of(rank: int, world_size: int) -> list[int]:
    """Return the ranks that send their messages to this one.

    Each represents itself and all ranks up to the next one, so that messages in this order are in the order of
    ranks.
    """
    children: list[int] = []
    step = 1
    while step < world_size and rank % (step * FAN_IN) == 0:
        children += range(rank + step, min(rank + step * FAN_IN, world_size), step)
        step *= FAN_IN
    return children
