"""Which checkpoints may go: the newest stay close together, older ones ever further apart."""

from __future__ import annotations

from collections.abc import Collection

from holdfast.protocol import parse_checkpoint_id


def expendable(checkpoints: Collection[str], keep: int, protected: Collection[str] = ()) -> list[str]:
    """The checkpoints to delete so that at most `keep` (and whatever is protected) remain.

    The newest half of `keep` always stays. Of the others, the one goes first whose removal leaves the
    smallest gap for its age, which spaces what remains exponentially: yesterday's iterations are kept
    hours apart, the last minute's are kept all.
    """
    order = sorted(checkpoints, key=parse_checkpoint_id)
    doomed: list[str] = []
    newest = max((parse_checkpoint_id(c)[0] for c in order), default=0)
    recent = order[len(order) - max(1, (keep + 1) // 2) :]
    while len(order) > keep:
        removable = [i for i, c in enumerate(order) if c not in protected and c not in recent]
        if not removable:
            break
        doomed.append(order.pop(min(removable, key=lambda i: _loss(order, i, newest))))
    return doomed


def _loss(order: list[str], i: int, newest: int) -> float:
    iteration = parse_checkpoint_id(order[i])[0]
    before = parse_checkpoint_id(order[i - 1])[0] if i else 0
    after = parse_checkpoint_id(order[i + 1])[0] if i + 1 < len(order) else newest
    return (after - before) / (newest - iteration + 1)
