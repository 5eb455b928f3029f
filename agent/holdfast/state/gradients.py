"""Gradients that belong to the state: those that a loop has accumulated and not applied yet.

Most loops have none when an iteration ends, or have those that the update has just used and the next iteration
discards. Any other gradient is stored, since a later backward pass adds to it.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from holdfast.errors import HoldfastError
from holdfast.torch_internals import has_unsynchronized_gradients, is_fully_sharded, version_of

logger = logging.getLogger("holdfast")

Parameters = Sequence[tuple[str, str, torch.Tensor]]
"""(keyword of the module, name within it, parameter)"""
_Mark = tuple["weakref.ref[torch.Tensor]", int]
"""A gradient right after an update, and its version (number of writes) at that time."""


class GradientTracker:
    """Observes gradients around updates to find, at the end of an iteration, those that still matter.

    Without observations, all do.
    """

    def __init__(self) -> None:
        self._marks: dict[torch.optim.Optimizer, list[_Mark | None]] = {}
        self._throws_away: dict[torch.optim.Optimizer, bool] = {}
        """Whether the script makes new gradients after an update, instead of adding to used ones."""
        self._left_out: set[torch.optim.Optimizer] = set()
        """Optimizers whose used gradients a checkpoint since their last update left out."""
        self._sparse: set[torch.optim.Optimizer] = set()
        """Optimizers that are always marked: a checkpoint cannot hold used sparse gradients in addition."""
        self._marking = True

    def before_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Learn from the first update after a marked one whether the script discards used gradients.

        A later update that contradicts this makes all gradients be saved from then on.
        """
        marks = self._marks.get(optimizer)
        if marks is None or self._throws_away.get(optimizer) is False:
            return
        if optimizer in self._throws_away:
            if optimizer not in self._left_out:
                return
            self._left_out.discard(optimizer)
        now = [parameter.grad for parameter in _trained_by(optimizer)]
        if len(now) != len(marks):
            return
        pairs = zip(now, marks, strict=True)
        kept = any(mark is not None and grad is not None and grad is mark[0]() for grad, mark in pairs)
        if kept and (self._throws_away.get(optimizer) or optimizer in self._left_out):
            logger.warning(
                "%s: an update used gradients of the previous update, while earlier updates always used new ones. "
                "The checkpoint between the two lacks them: a resume from it gives other losses. Later "
                "checkpoints hold them",
                type(optimizer).__name__,
            )
        self._throws_away[optimizer] = not kept

    def after_update(self, optimizer: torch.optim.Optimizer, is_capture_expected: Callable[[], bool]) -> None:
        """Mark used gradients, at a microsecond per parameter, where that may be needed.

        `is_capture_expected` returns whether `pending` is likely to be called at the end of this iteration.
        """
        if not self._marking:
            return
        if optimizer not in self._throws_away or optimizer in self._sparse or is_capture_expected():
            gradients = [parameter.grad for parameter in _trained_by(optimizer)]
            self._marks[optimizer] = [_mark(gradient) for gradient in gradients]
            if any(map(_is_sparse, gradients)):
                self._sparse.add(optimizer)

    def pending(self, parameters: Parameters) -> Parameters:
        """Return those of `parameters` whose gradients the next iteration needs."""
        found = [each for each in parameters if each[2].grad is not None]
        # do not mark for a loop that ends its iterations without gradients; if some appear, all are stored
        self._marking = bool(found)
        if not found:
            self._marks.clear()
            return found
        used = set(self._used())
        return [each for each in found if id(each[2]) not in used]

    def _used(self) -> Iterator[int]:
        for optimizer, marks in self._marks.items():
            parameters = list(_trained_by(optimizer))
            if self._throws_away.get(optimizer, True) and len(parameters) == len(marks):
                is_known = optimizer in self._throws_away
                for parameter, mark in zip(parameters, marks, strict=True):
                    # before it is known, dense ones are stored, and sparse ones cannot be
                    may_discard = is_known or _is_sparse(parameter.grad)
                    if may_discard and mark is not None and _is_as_marked(parameter.grad, mark):
                        self._left_out.add(optimizer)
                        yield id(parameter)


def fully_sharded(modules: Mapping[str, torch.nn.Module]) -> list[tuple[str, torch.nn.Module]]:
    """Return the modules that `fully_shard` was applied to, with the keyword of each."""
    return [(k, each) for k, module in modules.items() for each in module.modules() if is_fully_sharded(each)]


def require_synchronized(modules: Iterable[tuple[str, torch.nn.Module]]) -> None:
    """Raise HoldfastError if a fully sharded module has gradients that are not yet summed over the ranks."""
    for keyword, module in modules:
        if has_unsynchronized_gradients(module):
            raise HoldfastError(
                f"{keyword}: fully_shard holds gradients that are not synchronized: call session.step() after a "
                "backward pass with set_requires_gradient_sync(True) and set_requires_all_reduce(True)"
            )


def require_gradients(modules: Mapping[str, torch.nn.Module], saved: Any) -> None:
    """Raise ValueError for gradients that `restore_gradients` cannot restore."""
    if not isinstance(saved, dict) or not all(isinstance(each, dict) for each in saved.values()):
        raise ValueError("gradients are not given by keyword and name")
    for keyword, gradients in saved.items():
        parameters = dict(modules[keyword].named_parameters()) if keyword in modules else {}
        for name, gradient in gradients.items():
            if not isinstance(gradient, torch.Tensor):
                raise ValueError(f"{keyword}.{name} is not a tensor")
            if name in parameters and gradient.shape != parameters[name].shape:
                raise ValueError(f"{keyword}.{name} has another shape than its parameter")


def restore_gradients(
    modules: Mapping[str, torch.nn.Module], saved: Mapping[str, Mapping[str, torch.Tensor]]
) -> None:
    """Give parameters the saved gradients, and remove all others."""
    given = {keyword: dict(module.named_parameters()) for keyword, module in modules.items()}
    for parameters in given.values():
        for parameter in parameters.values():
            parameter.grad = None
    for keyword, gradients in saved.items():
        for name, gradient in gradients.items():
            if keyword in given and name in given[keyword]:
                trained = given[keyword][name]
                trained.grad = gradient.to(trained.device)


def _trained_by(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _mark(gradient: torch.Tensor | None) -> _Mark | None:
    return None if gradient is None else (weakref.ref(gradient), version_of(gradient))


def _is_sparse(gradient: torch.Tensor | None) -> bool:
    return gradient is not None and gradient.layout is not torch.strided


def _is_as_marked(gradient: torch.Tensor | None, mark: _Mark) -> bool:
    return gradient is not None and gradient is mark[0]() and version_of(gradient) == mark[1]
