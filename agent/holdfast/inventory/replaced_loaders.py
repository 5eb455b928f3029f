"""Loaders of `session.batches` that a script puts in the place of others, but not again after a resume."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MOST_ITERATIONS = 10
"""So many iterations after a resume, or as many as a loader was used for before, are more than a turn of it."""
MOST_LOADERS = 64


class ReplacedLoaders:
    """Compares which loaders give batches, by their numbers, before a checkpoint and after it is resumed."""

    def __init__(self) -> None:
        self._uses: dict[int, tuple[int, int]] = {}
        """First and last iteration with batches of a loader, by its number; the one used last at the end."""
        self._iteration = 0
        self._saved: dict[int, tuple[int, int]] = {}
        """The same at the checkpoint, while it is compared."""
        self._drawn = 0
        """Iterations since the resume."""

    def state_dict(self) -> dict[str, Any]:
        return {"iteration": self._iteration, "uses": [[each, *uses] for each, uses in self._uses.items()]}

    def restored(self, state: Mapping[str, Any], *, is_in_place: bool) -> None:
        """Compare the next iterations with a `state_dict`; a restore in place goes on with the same loader."""
        self._iteration = state.get("iteration", 0)
        self._uses = {number: (first, last) for number, first, last in state.get("uses", ())}
        self._saved, self._drawn = ({} if is_in_place else dict(self._uses)), 0

    def iteration_ended(self, number: int | None) -> list[str]:
        """Describe, once, that the script draws from loaders that it had replaced; `number` is the last one."""
        self._iteration += 1
        if number is None:
            self._saved = {}
            return []
        first, _ = self._uses.pop(number, (self._iteration, 0))
        self._uses[number] = first, self._iteration
        if len(self._uses) > MOST_LOADERS:
            del self._uses[next(iter(self._uses))]
        if not self._saved:
            return []
        self._drawn += 1
        *_, (replacing, (begins, ends)) = self._saved.items()
        first, last = self._saved.get(number, (0, begins))
        is_replaced = last < begins < ends
        if not is_replaced or self._drawn > min(last - first + 1, MOST_ITERATIONS):
            self._saved = {}
        if not is_replaced or self._saved:
            return []
        return [
            f"after the resume, the script draws from loader {number + 1} of session.batches again; at the "
            f"checkpoint, loader {replacing + 1} had taken its place: unless they take turns, training goes on "
            "with other data, or from another position. Call session.batches for each loader before the loop, in "
            "the same order at each start, and choose among the iterators by session.iteration"
        ]
