"""Which checkpoints stay whatever the rules say: those that the records of a job point to."""

from __future__ import annotations

import time
from collections.abc import Iterable

from holdfast.protocol import parse_checkpoint_id
from holdfast.store.base import Lineage, Store

ASKED_FOR = 8
"""So many of the newest checkpoints that somebody asked for by hand outlive retention."""
HOLD_SECONDS = 86400.0
"""A copy takes no longer: whoever had begun it has died."""
UNDOABLE = 3
"""So many of the last restores can be undone: what they left outlives retention."""


def held(store: Store, job: str) -> set[str]:
    """What somebody copies just now, or had begun to not long ago. OSError: the store cannot say."""
    now = time.time()
    return {hold.checkpoint for hold in store.holds(job) if now - hold.at < HOLD_SECONDS}


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
