"""A learning rate that operators scale while a job trains, and the clipping of gradients of adapters."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch.optim import Optimizer

from holdfast import accelerators
from holdfast.session import OPEN_SESSIONS, Session

LOW, HIGH = 0.01, 10.0
LEAST_HIGH = 10.0
"""Least upper bound of `grad_clip`."""
MOST_CLIPPED = 1e30
"""A larger norm, such as infinity, is not meant to clip, and is not offered to operators."""


def scale_learning_rate(
    optimizer: Optimizer, name: str = "lr_scale", *, low: float = LOW, high: float = HIGH
) -> None:
    """Multiply the learning rates of an optimizer by a value that operators can change; it starts at 1.

    A hook before each step of the optimizer scales them, and one after it puts them back: schedulers, checkpoints
    and logs see the script's own. The session is the open one that checkpoints the optimizer, or the only one. A
    step that a CUDA graph captures is not scaled.

    Args:
        optimizer: the optimizer to scale; call this before or after the session is created.
        name: the value, as for `session.value`.
        low: least scale.
        high: largest scale.
    """
    _LearningRateScale(optimizer, name, low, high)


class _LearningRateScale:
    def __init__(self, optimizer: Optimizer, name: str, low: float, high: float) -> None:
        self._name, self._low, self._high = name, low, high
        self._session: weakref.ref[Session] | None = None
        self._scaled: list[tuple[dict[str, Any], Any, Any]] = []
        """Parameter groups, with their own learning rate and the scaled one."""
        self._is_reported = False
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(lambda *_: self.undo())

    def _before(self, optimizer: Optimizer, *_: object) -> None:
        self.undo()  # where the step before has raised
        if (session := self._session_of(optimizer)) is None:
            return
        scale = session.value(self._name, 1.0, low=self._low, high=self._high)
        if scale == 1.0:
            return
        if accelerators.is_capturing():
            if not self._is_reported:
                self._is_reported = True
                session.notice("warning", "value", f"{self._name} has no effect: a CUDA graph captures the step")
            return
        for group in optimizer.param_groups:
            own = group["lr"]
            group["lr"] = own * scale  # a new tensor where it is one: the own may be being copied
            self._scaled.append((group, own, group["lr"]))

    def undo(self) -> None:
        """Put the learning rates back, unless the step has set others."""
        for group, own, scaled in self._scaled:
            if group["lr"] is scaled:
                group["lr"] = own
        self._scaled.clear()

    def _session_of(self, optimizer: Optimizer) -> Session | None:
        session = self._session() if self._session is not None else None
        if session is not None and session in OPEN_SESSIONS:
            return session
        sessions = list(OPEN_SESSIONS)
        found = next((each for each in sessions if each.checkpoints(optimizer)), None)
        if found is None and len(sessions) == 1:
            found = sessions[0]
        if found is not None:
            self._session = weakref.ref(found)
            found.at_iteration_end(self.undo)
        return found


class GradientClip:
    """The value `grad_clip` of an adapter: the largest norm of the gradients; 0 does not clip them."""

    def __init__(self, session: Session) -> None:
        self._session, self._high = session, 0.0

    def value(self, own: float) -> float:
        """Return the value in force, which is the script's `own` until an operator changes it."""
        if not 0 <= own <= MOST_CLIPPED:
            return own
        self._high = self._high or max(LEAST_HIGH, 10.0 * own)
        return self._session.value("grad_clip", float(own), low=0.0, high=self._high)


def scale_all(optimizers: Iterable[Optimizer]) -> None:
    """Scale the learning rates of all optimizers of an adapter by `lr_scale`, once each."""
    for optimizer in optimizers:
        if optimizer not in _scaled_by_adapters:
            _scaled_by_adapters.add(optimizer)
            scale_learning_rate(optimizer)


_scaled_by_adapters: weakref.WeakSet[Optimizer] = weakref.WeakSet()
