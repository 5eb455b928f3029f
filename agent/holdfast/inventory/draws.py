"""What a loop draws in its iterations: batches that it keeps, loaders that are unsaved or replaced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from holdfast.data.loader import DataLoader
from holdfast.torch_internals import after_each_batch

COMPARED_ITERATIONS = (4, 6)
"""Numbers of first iterations after which their batches are compared: 4 may include the end of an epoch."""
REPEATED_ITERATIONS = 4
"""So many iterations without a batch of a loader that has ended show that the loop does not draw from it."""
WATCHED_ITERATIONS = 100
"""In so many first iterations, batches of torch's loaders are counted where the session knows no loader."""
_BATCHES = 0
"""Stands for `session.batches` among the identities of loaders."""
MOST_ITERATIONS = 10
"""So many iterations after a resume, or as many as a loader was used for before, are more than a turn of it."""
MOST_LOADERS = 64


class DrawnBatches:
    """Compares what iterations draw. Each finding is reported once."""

    def __init__(self) -> None:
        self._counts: list[int] = []
        """Batches in each of the first iterations after a resume."""
        self._ended: dict[int, tuple[frozenset[int], int]] = {}
        """Of loaders, by identity: which loaders gave batches when it gave its last one, and iterations since."""
        self._unsaved, self._with_unsaved = 0, 0
        """Batches of torch's loaders in this iteration, and iterations in a row that drew nothing else."""
        self._watched = 0
        """Iterations since batches of torch's loaders are counted."""
        self._unwatch: Callable[[], None] | None = None

    def close(self) -> None:
        """Count no more batches of torch's loaders."""
        self._watched = WATCHED_ITERATIONS
        if self._unwatch is not None:
            self._unwatch()
            self._unwatch = None

    def iteration_ended(
        self, loaders: Collection[DataLoader], batches: int, *, is_resumed: bool, knows_loaders: bool
    ) -> list[str]:
        """Describe what the iteration that ends shows.

        Args:
            loaders: those given to the session.
            batches: number of batches of `session.batches`.
            is_resumed: a checkpoint was restored before.
            knows_loaders: the session saves the position of any loader.
        """
        drawn = {id(loader): loader.drawn_count() for loader in loaders}
        kept = self._kept(batches + sum(drawn.values())) if is_resumed else None
        giving = frozenset(loader for loader, count in drawn.items() if count) | ({_BATCHES} if batches else set())
        repeated = [self._repeated(loader, giving) for loader in loaders]
        described = [kept, self._unsaved_loader(knows_loaders), *repeated]
        return [each for each in described if each is not None]

    def _kept(self, batches: int) -> str | None:
        """Notice a loop that draws, after a resume, batches that the attempt before has drawn as well."""
        counts = self._counts
        if len(counts) == COMPARED_ITERATIONS[-1]:
            return None
        counts.append(batches)
        if len(counts) not in COMPARED_ITERATIONS:
            return None
        first, *later = counts
        usual, _ = Counter(later).most_common(1)[0]
        if usual == 0 and first > 1 and not any(later):
            more = f"{first} batches before its first session.step and none in the iterations after it"
        elif 0 < usual == first - 1 and _is_steady(later, usual):
            more = "one batch more before its first session.step than in each iteration after it"
        else:
            return None
        counts += [0] * (COMPARED_ITERATIONS[-1] - len(counts))
        return (
            f"after the resume, the loop drew {more}. If it keeps a batch for the next iteration, the one that "
            "was kept at the checkpoint is lost: keep it in holdfast.Variables, and draw the first only where "
            "there is none"
        )

    def _repeated(self, loader: DataLoader, giving: frozenset[int]) -> str | None:
        """Notice a loop that goes on without a loader that it drew from in its iterations, as `cycle` does."""
        key = id(loader)
        if key in giving:
            self._ended[key] = giving, 0
            return None
        along, count = self._ended.get(key, (frozenset(), 0))
        if not loader.is_between_epochs or not giving <= along:
            self._ended.pop(key, None)
        elif key in self._ended:
            self._ended[key] = along, count + 1
            if count + 1 == REPEATED_ITERATIONS:
                return (
                    f"{REPEATED_ITERATIONS} iterations after the end of an epoch of the loader over "
                    f"{type(loader.dataset).__name__}, none has drawn from it again. If the loop repeats batches "
                    "that it keeps, as itertools.cycle does, it repeats other ones after a resume: begin each "
                    "epoch with a new loop over the loader, or use session.batches(loader, epochs=None)"
                )
        return None

    def _note_batch(self) -> None:
        self._unsaved += torch.is_grad_enabled()

    def _unsaved_loader(self, knows_loaders: bool) -> str | None:
        """Notice a loop that draws its batches from a loader of torch, in two iterations in a row."""
        if self._watched == WATCHED_ITERATIONS:
            return None
        self._watched += 1
        if knows_loaders:
            self.close()
        elif self._unwatch is None:
            self._unwatch = after_each_batch(self._note_batch)
        self._with_unsaved = self._with_unsaved + 1 if self._unsaved else 0
        is_found = self._with_unsaved == 2 and not knows_loaders
        self._unsaved = 0
        if is_found or self._watched == WATCHED_ITERATIONS:
            self.close()
        if not is_found:
            return None
        return (
            "the script draws from a DataLoader of torch, and no checkpoint holds its position: after a resume it "
            "begins an epoch anew. Draw from session.batches(loader), or use holdfast.DataLoader, which takes the "
            "same arguments, and give it to the session"
        )


def _is_steady(counts: list[int], usual: int) -> bool:
    """Whether all draw equally many, except that the last of an epoch draws one fewer and the next one more."""
    while usual - 1 in counts[:-1]:
        place = counts.index(usual - 1)
        if counts[place + 1] != usual + 1:
            return False
        counts = [*counts[:place], *counts[place + 2 :]]
    return all(count == usual for count in counts[:-1]) and counts[-1:] in ([], [usual], [usual - 1])


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
