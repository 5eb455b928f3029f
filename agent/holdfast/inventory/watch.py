"""The watch of one session: reports what it finds once; a boundary at which nothing is due costs little."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from holdfast.data.loader import DataLoader
from holdfast.data.reachable import lacking_states
from holdfast.inventory.changing_state import ChangingState
from holdfast.inventory.missing_state import missing
from holdfast.inventory.unsaved_objects import UnsavedObjects
from holdfast.state.registry import CapturedState, Registry

COMPARED_ITERATIONS = 4
"""Number of first iterations whose batches are counted, to notice a loop that draws one in advance."""


class Inventory:
    """Watches from its construction until it is closed. For the training thread."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._stepped: dict[int, weakref.ref[Optimizer]] = {}
        """Optimizers that made a step since the last boundary, by identity, unless they are known."""
        self._drawn_from: weakref.WeakSet[DataLoader] = weakref.WeakSet()
        known: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._known_loaders: weakref.WeakSet[DataLoader] = weakref.WeakSet()
        self._objects = UnsavedObjects(registry, self._stepped, self._drawn_from, known, self._known_loaders)
        self._changing = ChangingState(registry)
        self._batch_counts: list[int] = []
        """Batches of `session.batches` in each of the first iterations after a resume."""
        self._messages: list[tuple[str, str]] = []
        stepped = self._stepped

        def note(optimizer: Optimizer, *_: object) -> None:
            if optimizer not in known:
                stepped[id(optimizer)] = weakref.ref(optimizer)

        self._hook = register_optimizer_step_post_hook(note)
        DataLoader.watched_by.append(self._drawn_from)

    def close(self) -> None:
        self._hook.remove()
        DataLoader.watched_by[:] = [each for each in DataLoader.watched_by if each is not self._drawn_from]

    def begin(self) -> None:
        """Begin to compare attributes: training begins."""
        self._changing.begin()

    def missing(self, saved: Collection[str]) -> list[str]:
        """Describe what the objects show that no checkpoint holds; `saved` are those of the resumed checkpoint."""
        return missing(self._registry.given, saved)

    def lacking_states(self) -> list[str]:
        """Describe the given loaders whose `state_dict` is known to be incomplete."""
        return lacking_states(self._registry.given)

    def captured(self, state: CapturedState) -> None:
        """Compare what has changed with a state that a checkpoint will hold."""
        self._changing.captured(state)

    def compare_draws(self, batches: int) -> None:
        """Notice a loop that draws, after a resume, a batch that the attempt before has drawn as well.

        `batches` were drawn in the iteration that ends.
        """
        counts = self._batch_counts
        if len(counts) == COMPARED_ITERATIONS:
            return
        counts.append(batches)
        first, *later = counts
        if len(counts) == COMPARED_ITERATIONS and 0 < later[0] == first - 1 and len(set(later)) == 1:
            text = (
                "after the resume, the loop drew one batch more before its first session.step than in each "
                "iteration after it. If it keeps a batch for the next iteration, the one that was kept at the "
                "checkpoint is lost: keep it in holdfast.Variables, and draw the first only where there is none"
            )
            self._messages.append(("loader", text))

    def found(self, iteration: int, loaders: Callable[[], Collection[Any]]) -> list[tuple[str, str]]:
        """Describe what was found since the last call, each once, with the codes of notices.

        Args:
            iteration: number of iterations of this attempt.
            loaders: returns those whose positions are saved.
        """
        messages: list[tuple[str, str]] = []
        if self._messages:
            messages, self._messages = self._messages, messages
        is_known = self._drawn_from <= self._known_loaders
        if self._stepped or not is_known or self._objects.untrained.other is not None:
            messages += self._objects.found(loaders())
        if iteration >= self._changing.wakes_at:
            messages += [("inventory", each) for each in self._changing.found(iteration)]
        return messages
