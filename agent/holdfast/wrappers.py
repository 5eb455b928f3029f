"""Optimizers inside the wrappers that libraries put around them, and Accelerate's counter of iterations.

They are recognised by what they offer, so that none of these libraries is imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.optim import Optimizer

from holdfast.torch_internals import runs_step_hooks

DEPTH = 3
"""How many wrappers deep an optimizer is looked for."""


def unwrapped(item: Any) -> Any:
    """The optimizer inside a wrapper without state, such as an AcceleratedOptimizer; anything else unchanged."""
    while not runs_step_hooks(item) and _is_stateless_wrapper(item):
        item = item.optimizer
    return item


def optimizers_in(item: Any, depth: int = DEPTH) -> Iterator[Optimizer]:
    """The optimizers whose hooks run when `item` updates parameters: `item` itself, or what it wraps."""
    if runs_step_hooks(item):
        yield item
    elif depth and is_optimizer(item):
        for value in _attributes(item).values():
            for each in value if isinstance(value, (list, tuple)) else (value,):
                yield from optimizers_in(each, depth - 1)


def has_unseen_steps(item: Any) -> bool:
    """An optimizer of which no hook tells when it updates parameters."""
    return is_optimizer(item) and next(optimizers_in(item), None) is None


def is_optimizer(item: Any) -> bool:
    """By what it offers: a wrapper need not be a torch.optim.Optimizer."""
    return hasattr(item, "zero_grad") and hasattr(item, "step") and not isinstance(item, (nn.Module, type))


def has_plain_state(item: Any) -> bool:
    """An Optimizer whose `state_dict` has what torch's has, whatever else is in it."""
    return runs_step_hooks(item) and {"state", "param_groups"} <= item.state_dict().keys()


def has_no_state_dict(item: Any) -> bool:
    """An Optimizer that inherits `state_dict`, which fails where Optimizer.__init__ has not run."""
    return isinstance(item, Optimizer) and not runs_step_hooks(item) and _inherits_state_dict(item)


def is_accelerator(item: Any) -> bool:
    return type(getattr(item, "step", None)) is int and hasattr(item, "gradient_state")


class AcceleratorCounter:
    """Where an `accelerate.Accelerator` is within an accumulation of gradients, as something with a state_dict."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._accelerator.step, "sync_gradients": self._accelerator.sync_gradients}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._accelerator.step = state_dict["step"]
        self._accelerator.sync_gradients = state_dict["sync_gradients"]


def _is_stateless_wrapper(item: Any) -> bool:
    """It looks `state` and `param_groups` up in `item.optimizer` each time, and saves nothing else."""
    inner = getattr(item, "optimizer", None)
    if not isinstance(inner, Optimizer) or {"state", "param_groups"} & _attributes(item).keys():
        return False
    return (
        getattr(item, "state", None) is inner.state
        and getattr(item, "param_groups", None) is inner.param_groups
        and (_inherits_state_dict(item) or item.state_dict().keys() == inner.state_dict().keys())
    )


def _inherits_state_dict(item: Any) -> bool:
    return getattr(type(item), "state_dict", None) is Optimizer.state_dict


def _attributes(item: Any) -> dict[str, Any]:
    return getattr(item, "__dict__", {})
