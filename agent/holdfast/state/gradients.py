"""Gradients that outlive an iteration: what a loop has accumulated and not applied yet.

Most loops hold none where an iteration ends, or hold those that the update has just used and that the next
iteration throws away. The others belong to the state: a backward pass adds to them.
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
"""A gradient right after an update, and how often it had been written to by then."""


class Gradients:
    """Watches the gradients around updates, to tell at the end of an iteration which of them still matter.

    Where it has not looked, all that there are do.
    """

    def __init__(self) -> None:
        self.asked_soon: Callable[[], bool] = lambda: True
        """Whether `pending` is likely to be called at the end of this iteration: a look takes a microsecond a
        parameter."""
        self._marks: dict[torch.optim.Optimizer, list[_Mark | None]] = {}
        self._throws_away: dict[torch.optim.Optimizer, bool] = {}
        """Whether the script makes new gradients after an update, rather than add to those that it used."""
        self._left_out: set[torch.optim.Optimizer] = set()
        """Those whose used gradients the checkpoint since their last update does not hold."""
        self._marking = True

    def before_update(self, optimizer: torch.optim.Optimizer) -> None:
        """The first update after a marked one shows what the script does with gradients that were used.

        A later one shows when it does otherwise: from then on all gradients are saved.
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
        if kept and self._throws_away.get(optimizer):
            logger.warning(
                "%s: an update uses gradients that the update before it had used, where the loop had always made "
                "new ones; the checkpoint taken between the two lacks them, and a resume from it gives other "
                "losses. Later checkpoints hold them",
                type(optimizer).__name__,
            )
        self._throws_away[optimizer] = not kept

    def after_update(self, optimizer: torch.optim.Optimizer) -> None:
        if self._marking and (optimizer not in self._throws_away or self.asked_soon()):
            self._marks[optimizer] = [_mark(parameter.grad) for parameter in _trained_by(optimizer)]

    def pending(self, parameters: Parameters) -> Parameters:
        """Those of `parameters` whose gradients the next iteration goes on from."""
        found = [each for each in parameters if each[2].grad is not None]
        # a loop that ends its iterations without gradients is spared the marks; all that turn up are then kept
        self._marking = bool(found)
        if not found:
            self._marks.clear()
            return found
        used = set(self._used())
        return [each for each in found if id(each[2]) not in used]

    def _used(self) -> Iterator[int]:
        for optimizer, marks in self._marks.items():
            parameters = list(_trained_by(optimizer))
            if self._throws_away.get(optimizer) and len(parameters) == len(marks):
                for parameter, mark in zip(parameters, marks, strict=True):
                    if mark is not None and _is_as_marked(parameter.grad, mark):
                        self._left_out.add(optimizer)
                        yield id(parameter)


def fully_sharded(modules: Mapping[str, torch.nn.Module]) -> list[tuple[str, torch.nn.Module]]:
    """Those that `fully_shard` was applied to, and the keywords under which they are given."""
    return [(k, each) for k, module in modules.items() for each in module.modules() if is_fully_sharded(each)]


def require_synchronized(modules: Iterable[tuple[str, torch.nn.Module]]) -> None:
    """HoldfastError where one of those `fully_sharded` holds gradients not yet summed up over the ranks."""
    for keyword, module in modules:
        if has_unsynchronized_gradients(module):
            raise HoldfastError(
                f"{keyword}: fully_shard holds gradients that are not synchronised: call session.step() after "
                "the backward pass with set_requires_gradient_sync(True), once an update"
            )


def require_gradients(modules: Mapping[str, torch.nn.Module], saved: Any) -> None:
    """ValueError for what `put_back` cannot put back."""
    if not isinstance(saved, dict) or not all(isinstance(each, dict) for each in saved.values()):
        raise ValueError("it does not hold gradients by keyword and name")
    for keyword, gradients in saved.items():
        parameters = dict(modules[keyword].named_parameters()) if keyword in modules else {}
        for name, gradient in gradients.items():
            if not isinstance(gradient, torch.Tensor):
                raise ValueError(f"{keyword}.{name} is no tensor")
            if name in parameters and gradient.shape != parameters[name].shape:
                raise ValueError(f"{keyword}.{name} has another shape than its parameter")


def put_back(modules: Mapping[str, torch.nn.Module], saved: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    """Give parameters the gradients that were saved, and the others none, as at the checkpoint."""
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


def _is_as_marked(gradient: torch.Tensor | None, mark: _Mark) -> bool:
    return gradient is not None and gradient is mark[0]() and version_of(gradient) == mark[1]
