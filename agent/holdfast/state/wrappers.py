"""What a session keeps of the objects that it is given: modules and optimizers inside their wrappers.

They are recognised by what they offer, so that none of these libraries is imported.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from holdfast.errors import DamagedCheckpoint, IncompatibleCheckpoint
from holdfast.format.manifest import MANIFEST
from holdfast.state.rng import OwnGenerator, is_generator
from holdfast.torch_internals import compiled_from, runs_step_hooks

RESERVED = ("rng", "session", "gradients")
"""Entries of a checkpoint that are the session's own."""
DEPTH = 3
"""How many wrappers deep an optimizer is looked for."""


@runtime_checkable
class Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


def accepted(keyword: str, item: Any) -> Stateful:
    """What a session keeps of an object that it was given. TypeError or ValueError when it cannot."""
    if keyword in RESERVED:
        raise ValueError(f"Session({keyword}=...): this name is taken in checkpoints; give it another")
    if is_generator(item):
        return OwnGenerator(item)
    if is_accelerator(item):
        return AcceleratorCounter(item)
    if not isinstance(item, Stateful):
        raise TypeError(f"Session({keyword}=...): {_no_state_dict(keyword, item)}")
    inside: Stateful = unwrapped(_unwrapped(item))
    if has_no_state_dict(inside):
        raise TypeError(
            f"Session({keyword}=...): {type(inside).__name__} does not call torch.optim.Optimizer.__init__, and "
            "has no state_dict() of its own: let its __init__ call super().__init__(params, defaults)"
        )
    if isinstance(inside, torch.nn.Module):
        for name, tensor in itertools.chain(inside.named_parameters(), inside.named_buffers()):
            if is_lazy(tensor):
                raise TypeError(
                    f"Session({keyword}=...): {name} of a lazy module has no values before the first batch: call "
                    "the model with one, or initialize_parameters, before the Session is made"
                )
    for part in inside.modules() if isinstance(inside, torch.nn.Module) else (inside,):
        if (instead := _NOT_SUPPORTED.get(type(part).__name__)) and type(part).__module__.startswith("torch."):
            raise TypeError(f"Session({keyword}=...): {type(part).__name__} is not supported: {instead}")
    return inside


def _no_state_dict(keyword: str, item: Any) -> str:
    """What is missing, and the way out."""
    missing = f"{type(item).__name__} has no state_dict() and load_state_dict()."
    for name in ("optimizer", "scheduler"):
        if isinstance(getattr(item, name, None), Stateful):
            return (
                f"{missing} Give it both, or give what it wraps, Session({keyword}={keyword}.{name}), and put the "
                "values that it keeps itself into holdfast.Variables."
            )
    return f"{missing} Put plain values into holdfast.Variables, or drop the keyword."


_NOT_SUPPORTED = {
    "FullyShardedDataParallel": "shard the model with torch.distributed.fsdp.fully_shard",
    "ZeroRedundancyOptimizer": "use the optimizer inside it with torch.distributed.fsdp.fully_shard",
}


def _unwrapped(item: Any) -> Any:
    """A module inside what compiles it or keeps it the same on all ranks: its names depend on neither."""
    while True:
        if (compiled := compiled_from(item)) is not None:
            item = compiled
        elif isinstance(item, DistributedDataParallel):
            item = item.module
        else:
            return item


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


def require_attributes(path: str, item: object, state: Any) -> None:
    """DamagedCheckpoint where a state to be set as attributes would replace code, or another object."""
    if not isinstance(state, Mapping):
        raise DamagedCheckpoint(MANIFEST, f"state.{path} is no state of a {type(item).__name__}")
    own: Mapping[str, Any] = item.state_dict() if isinstance(item, Stateful) else vars(item)
    for name in state.keys() - own.keys():
        if name in vars(item) or _is_code(inspect.getattr_static(type(item), name, None)):
            raise DamagedCheckpoint(MANIFEST, f"state.{path}.{name} is no value of a {type(item).__name__}")
    for name in state.keys() & own.keys():
        if callable(own[name]):
            raise IncompatibleCheckpoint(f"{path}.{name} is a function here, and a value in the checkpoint")
    for name in ("_schedulers", "lr_lambdas"):  # they load what is saved of them in turn
        if inner := vars(item).get(name):
            if not isinstance(state.get(name), list) or len(state[name]) != len(inner):
                raise IncompatibleCheckpoint(f"{path}.{name}: {len(inner)} here, another number in the checkpoint")
            for number, saved in enumerate(state[name]):
                if saved is not None:
                    require_attributes(f"{path}.{name}.{number}", inner[number], saved)
    if state.get("_scale_fn_custom") is not None:
        require_attributes(
            f"{path}._scale_fn_custom", vars(item).get("_scale_fn_custom"), state["_scale_fn_custom"]
        )


def _is_code(attribute: object) -> bool:
    return callable(attribute) or hasattr(type(attribute), "__get__")
