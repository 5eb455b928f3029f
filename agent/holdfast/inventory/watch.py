"""The watch of one session: reports what it finds once; a boundary at which nothing is due costs little."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from holdfast.data.loader import DataLoader
from holdfast.data.reachable import has_position, lacking_states
from holdfast.inventory.changing_state import ChangingState
from holdfast.inventory.drawn_iterators import unsaved_iterators
from holdfast.inventory.draws import DrawnBatches, ReplacedLoaders
from holdfast.inventory.early_draws import EarlyDraws
from holdfast.inventory.loop_counters import LoopCounters
from holdfast.inventory.missing_state import missing
from holdfast.inventory.unsaved_objects import UnsavedObjects
from holdfast.inventory.weight_copies import WeightCopies
from holdfast.state.registry import CapturedState, Registry
from holdfast.state.variables import Variables

logger = logging.getLogger("holdfast")
DRAWING_ITERATION = 2
"""Iteration of an attempt after which what its loop draws from is looked at."""


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
        self._draws = DrawnBatches()
        self._counters, self._early = LoopCounters(), EarlyDraws()
        self._replaced, self._copies = ReplacedLoaders(), WeightCopies(registry)
        self._iterations = 0
        self._epochs: list[int] | None = None
        """Epochs of the loaders at the resume, while what the script's loop does after it is compared."""
        self._seeds: str | None = None
        """State of the random generators at the first start, if the checkpoint has it."""
        self._messages: list[tuple[str, str]] = []
        stepped = self._stepped

        def note(optimizer: Optimizer, *_: object) -> None:
            if optimizer not in known:
                stepped[id(optimizer)] = weakref.ref(optimizer)

        self._hook = register_optimizer_step_post_hook(note)
        DataLoader.watched_by.append(self._drawn_from)

    def close(self) -> None:
        self._hook.remove()
        self._draws.close()
        DataLoader.watched_by[:] = [each for each in DataLoader.watched_by if each is not self._drawn_from]

    def begin(self) -> None:
        """Begin to compare attributes: training begins. Called within `Session.resume` or `Session.batches`."""
        self._changing.begin()
        if self._epochs is None:
            self._early.begin()
        else:
            self._note(lambda: self._early.resumed(self._seeds))

    def state_dict(self) -> dict[str, Any]:
        """Return what the next start compares with its own script. Called within `Session.step`."""
        try:
            loop = {"counters": self._counters.state_dict(), "seeds": self._early.state_dict()}
            return loop | {"loaders": self._replaced.state_dict()}
        except Exception as error:  # source and objects of the script may be anything
            logger.debug("the loop is not compared: %s: %s", type(error).__name__, error)
            return {}

    def before_resume(self) -> None:
        """Look at the random state of the script, before it is restored."""
        self._early.before_resume()

    def restored(self, state: Mapping[str, Any], epochs: list[int], *, is_in_place: bool) -> None:
        """Compare the script with that of a checkpoint that was restored.

        Args:
            state: the `state_dict` in the checkpoint; empty in older ones.
            epochs: epochs of the loaders, in the order in which `compare_draws` gets them.
        """
        self._counters.restored(state.get("counters", {}), is_in_place=is_in_place)
        self._replaced.restored(state.get("loaders", {}), is_in_place=is_in_place)
        self._epochs, self._seeds = epochs, state.get("seeds")

    def _compare_loop(self, then: list[int], now: list[int]) -> None:
        """Compare one of the first iterations after a restore."""
        has_advanced = now != then if then and len(now) == len(then) else None
        self._note(lambda: self._counters.iteration_ended(epoch_advanced=has_advanced))
        self._note(lambda: self._early.iteration_ended(epoch_advanced=has_advanced))
        if not (self._counters.is_waiting or self._early.is_waiting):
            self._epochs = None

    def _note(self, describe: Callable[[], list[str]]) -> None:
        try:
            self._messages += [("inventory", each) for each in describe()]
        except Exception as error:  # source and objects of the script may be anything
            logger.debug("the loop is not compared: %s: %s", type(error).__name__, error)

    def missing(self, saved: Collection[str]) -> list[str]:
        """Describe what the objects show that no checkpoint holds; `saved` are those of the resumed checkpoint."""
        try:
            return missing(self._registry.given, saved)
        except Exception as error:  # objects of the script may be anything
            logger.debug("the objects are not searched: %s: %s", type(error).__name__, error)
            return []

    def lacking_states(self) -> list[str]:
        """Describe the given loaders whose `state_dict` is known to be incomplete."""
        return lacking_states(self._registry.given)

    def captured(self, state: CapturedState) -> None:
        """Compare what has changed with a state that a checkpoint will hold."""
        self._changing.captured(state)
        if self._objects.named_in_code:
            self._note(lambda: self._objects.captured(state))
        self._note(lambda: self._copies.captured(state))

    def compare_draws(
        self,
        loaders: Collection[DataLoader],
        batches: int,
        *,
        number: int | None,
        is_resumed: bool,
        knows_loaders: bool,
        epochs: Callable[[], list[int]],
    ) -> None:
        """Compare the iteration that ends with others; see `DrawnBatches.iteration_ended`.

        `number` is that of the loader of `session.batches` that gave the last batch; `epochs` returns the epochs
        of all loaders.
        """
        self._note(lambda: self._replaced.iteration_ended(number))
        self._iterations += 1
        if self._iterations == 1:
            self._note(self._copies.begin)
        if self._epochs is not None:
            self._compare_loop(self._epochs, epochs())
        knows_loaders = knows_loaders or bool(self._drawn_from or self._known_loaders)  # unsaved ones are named
        found = self._draws.iteration_ended(loaders, batches, is_resumed=is_resumed, knows_loaders=knows_loaders)
        self._messages += [("loader", each) for each in found]
        is_known = knows_loaders or bool(found) or self._has_position()
        if self._iterations == DRAWING_ITERATION and not is_known:
            self._note(unsaved_iterators)

    def _has_position(self) -> bool:
        """Whether a given object may hold the position in the data."""
        return any(isinstance(each, Variables) or has_position(each) for each in self._registry.given.values())

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
            messages += [("inventory", each) for each in self._changing.found(iteration, loaders)]
        return messages
