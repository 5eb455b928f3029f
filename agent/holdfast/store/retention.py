"""Which checkpoints may go: the newest stay close together, older ones ever further apart."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable

from holdfast.protocol import parse_checkpoint_id
from holdfast.store.base import Lineage

ASKED_FOR = 8
"""So many of the newest checkpoints that somebody asked for by hand outlive retention."""
UNDOABLE = 3
"""So many of the last restores can be undone: what they left outlives retention."""


def protected(lineages: Iterable[Lineage], current: int, asked_for: Iterable[str] = ()) -> set[str]:
    """Where the lineages that `current` descends from began, the ways back, the last that were asked for."""
    known = {lineage.number: lineage for lineage in sorted(lineages, key=lambda lineage: lineage.number)}
    kept = {lineage.left for lineage in list(known.values())[-UNDOABLE:]}
    kept |= set(list(asked_for)[-ASKED_FOR:])
    number = current
    while number in known and (parent := known[number].parent) is not None:
        kept.add(parent)
        before = parse_checkpoint_id(parent)[1]
        number = before if before < number else 0  # a record that names a later lineage is none to follow
    return {checkpoint for checkpoint in kept if checkpoint is not None}


def expendable(checkpoints: Collection[str], keep: int, protected: Collection[str] = ()) -> list[str]:
    """The checkpoints to delete so that at most `keep` (and whatever is protected) remain.

    The newest half of `keep` always stays. Of the others, the one goes first whose removal leaves the
    smallest gap for its age, which spaces what remains exponentially: yesterday's iterations are kept
    hours apart, the last minute's are kept all. Newest means trained last: after a restore, iteration 60 of
    the lineage it began is newer than iteration 90 of the one that was left.
    """
    order = sorted(checkpoints, key=_trained)
    recent = set(order[-max(1, (keep + 1) // 2) :])
    doomed: list[str] = []
    while len(order) > keep:
        removable = [i for i, c in enumerate(order) if c not in protected and c not in recent]
        if not removable:
            break
        places = _places(order)
        doomed.append(order.pop(min(removable, key=lambda i: _loss(places, i))))
    return doomed


def _trained(checkpoint: str) -> tuple[int, int]:
    iteration, lineage = parse_checkpoint_id(checkpoint)
    return lineage, iteration


def _places(order: list[str]) -> list[int]:
    """Iterations trained up to each checkpoint, abandoned ones included, as far as checkpoints tell."""
    iterations = [parse_checkpoint_id(checkpoint)[0] for checkpoint in order]
    steps = (max(1, abs(after - before)) for before, after in itertools.pairwise(iterations))
    return list(itertools.accumulate(steps, initial=iterations[0]))


def _loss(places: list[int], i: int) -> float:
    """The gap that removing one leaves, as a share of its age."""
    before = places[i - 1] if i else 0
    return (places[min(i + 1, len(places) - 1)] - before) / (places[-1] - places[i] + 1)
