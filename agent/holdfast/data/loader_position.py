"""The position of a `holdfast.DataLoader` among its iterators, and what iterations have trained on."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import torch

from holdfast.data.indexed import DataPosition

logger = logging.getLogger("holdfast")


@dataclass(slots=True)
class IteratorState:
    """State of the iterators of a loader: which one the position follows, and what has been trained on."""

    seek_count: int = 0
    """Number of calls of `seek`."""
    set_position: DataPosition = field(default_factory=DataPosition)
    """Position set last: by `seek`, or the initial one."""
    drawing: int = 0
    """Number of the script's own loops that are in the middle of an epoch."""
    seed_drawn: bool = False
    has_session: bool = False
    """Whether a session calls `iteration_ended`."""
    gives_to_session: bool = False
    """Whether `session.batches` draws from the loader: a loop of the script evaluates."""
    open: set[object] = field(default_factory=set)
    """Iterators that have given a batch and have not ended."""
    current: object | None = None
    """Open iterator that the position follows."""
    last: object | None = None
    """Iterator that gave the last batch; it may have ended."""
    began: DataPosition = field(default_factory=DataPosition)
    """Position at which the current iterator began."""
    trained_on: bool = False
    """Whether the current epoch has been trained on: the next iterator begins the next epoch."""
    left_untrained: bool = False
    """Whether an iterator has ended since the last iteration ended, and the position was reset."""
    unused_rest: bool = False
    """Whether that iterator gave the rest of an epoch after a resume, enough for an iteration."""
    with_gradients: bool = True
    """Whether gradients were enabled when the last batch was drawn."""
    trains_with_gradients: bool | None = None
    """The same of the last batch that an iteration used; `None` if none has ended within a loop."""
    counted: DataPosition = field(default_factory=DataPosition)
    """Position at the end of the last iteration."""
    drawn: int = 0
    """Number of batches that the script's own loops got since `drawn_count` was called."""
    taken_per_iteration: int | None = None
    """How far an iteration moved the position, at most; `None` if none has ended within a loop."""


def after(position: DataPosition) -> DataPosition:
    """Return the beginning of the next epoch."""
    return DataPosition(epoch=position.epoch + 1, padded=position.padded)


class LoaderPosition:
    """Follows the iterators of a loader."""

    def __init__(self) -> None:
        self.position = DataPosition()
        self._iterators = IteratorState()
        self._warned: set[str] = set()

    def _set_dataset_state(self, state: dict[str, Any] | None) -> None:
        """Set the state from which an iterable dataset continues."""
        raise NotImplementedError

    @property
    def is_iterated_directly(self) -> bool:
        """Whether the script is in the middle of its own loop `for batch in loader`."""
        return self._iterators.drawing > 0

    @property
    def continues(self) -> bool:
        """Whether the current epoch has given batches before."""
        return self.position.taken > 0

    @property
    def _goes_on(self) -> bool:
        """Whether a new iterator gives the rest of an epoch, as after a resume."""
        return self._iterators.current is None and not self._iterators.trained_on and self.position.taken > 0

    @property
    def _is_evaluation(self) -> bool:
        """Whether a new iterator evaluates: gradients are off here, and on where training draws its batches."""
        return self._iterators.trains_with_gradients is True and not torch.is_grad_enabled()

    def _warn_once(self, about: str, message: str) -> None:
        if about not in self._warned:
            self._warned.add(about)
            logger.warning(message)

    def mark_warned(self, about: str) -> None:
        """Give no warning about this: the framework of an integration gives its own."""
        self._warned.add(about)

    def attach_session(self) -> None:
        """Let a session count iterations from now on. Batches drawn before are not counted."""
        state = self._iterators
        if not state.has_session:
            state.has_session, state.trained_on, state.left_untrained = True, False, False
            if state.current is None:
                self.position = state.set_position

    def give_to_session(self) -> None:
        """Record that `session.batches` draws from the loader, and that its iterations are counted there."""
        self.attach_session()
        self._iterators.gives_to_session = True

    def detach_session(self) -> None:
        """Record that the session is closed."""
        state = self._iterators
        state.has_session, state.gives_to_session, state.set_position = False, False, self.position

    def iteration_ended(self) -> None:
        """Record the end of an iteration: the batches drawn so far have been used for training."""
        state = self._iterators
        if state.current is not None:
            self.use_batches()
            began = state.counted.taken if state.counted.epoch == self.position.epoch else 0
            state.counted = self.position
            state.taken_per_iteration = max(state.taken_per_iteration or 0, self.position.taken - began)
        # the loop was left: a resume begins the next epoch. Where iterations end within the loop, it evaluated,
        # unless it drew the batches of this iteration ahead
        elif state.trained_on or (
            state.left_untrained and (state.trains_with_gradients is None or state.unused_rest)
        ):
            self._count_pass()

    def drawn_count(self) -> int:
        """Return how many batches the script's own loops got since the last call."""
        count, self._iterators.drawn = self._iterators.drawn, 0
        return count

    @property
    def is_between_epochs(self) -> bool:
        """Whether an epoch that iterations trained on has ended, and the next one has not begun."""
        state = self._iterators
        return state.current is None and not self.position.taken and state.trains_with_gradients is not None

    def use_batches(self) -> None:
        """Record that the loop trains on its batches, though this may not be the end of an iteration."""
        state = self._iterators
        if state.current is not None:
            state.trained_on, state.trains_with_gradients = True, state.with_gradients

    def use_last_batch(self) -> None:
        """Record that training uses the last batch of a pass that has ended, as frameworks that draw ahead do."""
        if self._iterators.current is None and self._iterators.left_untrained:
            self._count_pass()

    def _count_pass(self) -> None:
        self.position = after(self.position)
        self._set_dataset_state(None)
        self._iterators.trained_on = self._iterators.left_untrained = self._iterators.unused_rest = False
