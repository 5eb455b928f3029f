"""Modules and optimizers inside wrappers of other libraries.

Wrappers are recognized by their attributes, so that none of these libraries is imported.
"""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from holdfast.errors import DamagedCheckpoint, IncompatibleCheckpoint
from holdfast.format.manifest import MANIFEST
from holdfast.state.references import attributes
from holdfast.state.rng import StatefulGenerator, is_generator
from holdfast.torch_internals import compiled_from, runs_step_hooks

RESERVED = ("rng", "session", "gradients")
"""Keywords that the session uses itself in a checkpoint."""
StepArguments = tuple[Any, ...]
StepKeywords = dict[str, Any]
DEPTH = 3
"""Number of nested wrappers in which an optimizer is searched."""


@runtime_checkable
class Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


def checkpointable(keyword: str, item: Any) -> Stateful:
    """Return the object to checkpoint for one that was given. TypeError or ValueError if there is none."""
    if keyword in RESERVED:
        raise ValueError(f"Session({keyword}=...): this name is reserved in checkpoints; use another one")
    if is_generator(item):
        return StatefulGenerator(item)
    if is_accelerator(item):
        return AcceleratorCounter(item)
    if (parts := given_modules(item)) is not None:
        from holdfast.state.stages import PipelineStages  # only for pipelines

        item = PipelineStages(keyword, map(_unwrapped, parts))
    if not isinstance(item, Stateful):
        raise TypeError(f"Session({keyword}=...): {_no_state_dict(keyword, item)}")
    inside: Stateful = unwrapped(_unwrapped(item))
    if has_no_state_dict(inside):
        raise TypeError(
            f"Session({keyword}=...): {type(inside).__name__} neither calls torch.optim.Optimizer.__init__ nor "
            "defines state_dict(): let its __init__ call super().__init__(params, defaults)"
        )
    if isinstance(inside, torch.nn.Module):
        for name, tensor in itertools.chain(inside.named_parameters(), inside.named_buffers()):
            if is_lazy(tensor):
                raise TypeError(
                    f"Session({keyword}=...): {name} of a lazy module is not initialized: call the model with a "
                    "batch, or call initialize_parameters, before creating the Session"
                )
    for part in inside.modules() if isinstance(inside, torch.nn.Module) else (inside,):
        if (instead := _NOT_SUPPORTED.get(type(part).__name__)) and type(part).__module__.startswith("torch."):
            raise TypeError(f"Session({keyword}=...): {type(part).__name__} is not supported: {instead}")
    return inside


def given_modules(item: Any) -> list[nn.Module] | None:
    """Return the modules of a list of pipeline stages, or of one `PipelineStage`; `None` for other objects."""
    if isinstance(item, (list, tuple)):
        parts = [each.submod if _is_pipeline_stage(each) else each for each in item]
        return parts if all(isinstance(each, nn.Module) for each in parts) else None
    return [item.submod] if _is_pipeline_stage(item) else None


def _is_pipeline_stage(item: Any) -> bool:
    return not isinstance(item, nn.Module) and hasattr(item, "stage_index") and hasattr(item, "submod")


def _no_state_dict(keyword: str, item: Any) -> str:
    """Say what is missing and what to do."""
    missing = f"{type(item).__name__} has no state_dict() and load_state_dict()."
    for name in ("optimizer", "scheduler"):
        if isinstance(getattr(item, name, None), Stateful):
            return (
                f"{missing} Define both, or give the wrapped object, Session({keyword}={keyword}.{name}), and put "
                "the values of the wrapper into holdfast.Variables."
            )
    return f"{missing} Put plain values into holdfast.Variables, or drop the keyword."


_NOT_SUPPORTED = {
    "FullyShardedDataParallel": "shard the model with torch.distributed.fsdp.fully_shard",
    "ZeroRedundancyOptimizer": "use the optimizer inside it with torch.distributed.fsdp.fully_shard",
}


def _unwrapped(item: Any) -> Any:
    """Return the module inside torch.compile, Fabric and DistributedDataParallel, whose prefixes change names."""
    while True:
        if (compiled := compiled_from(item)) is not None:
            item = compiled
        elif isinstance(item, DistributedDataParallel):
            item = item.module
        elif (inside := _inside_fabric(item)) is not None:
            item = inside
        else:
            return item


def _inside_fabric(item: Any) -> Any:
    """Return the module inside one that `fabric.setup` of Lightning returned; `None` for any other object."""
    is_wrapper = isinstance(item, nn.Module) and hasattr(item, "_original_module")
    return getattr(item, "_forward_module", None) if is_wrapper else None


def unwrapped(item: Any) -> Any:
    """Return the optimizer inside a stateless wrapper, such as an AcceleratedOptimizer; else `item`."""
    while not runs_step_hooks(item) and _is_stateless_wrapper(item):
        item = item.optimizer
    return item


def optimizers_in(item: Any, depth: int = DEPTH) -> Iterator[Optimizer]:
    """Yield the optimizers whose hooks run when `item` updates parameters: `item`, or what it wraps."""
    if runs_step_hooks(item):
        yield item
    elif depth and is_optimizer(item):
        for value in attributes(item).values():
            for each in value if isinstance(value, (list, tuple)) else (value,):
                yield from optimizers_in(each, depth - 1)


def has_unseen_steps(item: Any) -> bool:
    """Whether an optimizer updates parameters without running any hook."""
    return is_optimizer(item) and next(optimizers_in(item), None) is None


def is_optimizer(item: Any) -> bool:
    """Whether an object has the methods of an optimizer: a wrapper need not be a torch.optim.Optimizer."""
    return hasattr(item, "zero_grad") and hasattr(item, "step") and not isinstance(item, (nn.Module, type))


def has_plain_state(item: Any) -> bool:
    """Whether an Optimizer's `state_dict` has the entries of torch's."""
    return runs_step_hooks(item) and {"state", "param_groups"} <= item.state_dict().keys()


def has_no_state_dict(item: Any) -> bool:
    """Whether an Optimizer inherits `state_dict` but has not run Optimizer.__init__, so that it fails."""
    return isinstance(item, Optimizer) and not runs_step_hooks(item) and _inherits_state_dict(item)


def is_accelerator(item: Any) -> bool:
    return type(getattr(item, "step", None)) is int and hasattr(item, "gradient_state")


def is_unaware_of_ranks() -> bool:
    """Whether Accelerate runs as one process, as under torchrun on CPUs without ACCELERATE_USE_CPU."""
    state = sys.modules.get("accelerate.state")
    return state is not None and state.is_initialized() and state.PartialState().num_processes == 1


class AcceleratorCounter:
    """Gives an `accelerate.Accelerator` a state_dict: its position within an accumulation of gradients."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._accelerator.step, "sync_gradients": self._accelerator.sync_gradients}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._accelerator.step = state_dict["step"]
        self._accelerator.sync_gradients = state_dict["sync_gradients"]


def _is_stateless_wrapper(item: Any) -> bool:
    """Whether a wrapper takes all its state from `item.optimizer`."""
    inner = getattr(item, "optimizer", None)
    if not isinstance(inner, Optimizer) or {"state", "param_groups"} & attributes(item).keys():
        return False
    return (
        getattr(item, "state", None) is inner.state
        and getattr(item, "param_groups", None) is inner.param_groups
        and (_inherits_state_dict(item) or item.state_dict().keys() == inner.state_dict().keys())
    )


def _inherits_state_dict(item: Any) -> bool:
    return getattr(type(item), "state_dict", None) is Optimizer.state_dict


def wait_after_closure(
    args: StepArguments, kwargs: StepKeywords, wait: Callable[[], None]
) -> tuple[StepArguments, StepKeywords] | None:
    """Return the arguments of an optimizer's `step` with `wait` added to the end of its closure, if it has one.

    The closure runs the forward and the backward pass, which overlap with a copy; parameters change after it.
    """
    by_name = "closure" in kwargs
    closure = kwargs["closure"] if by_name else next(iter(args[1:]), None)
    if closure is None:
        return None

    def closure_then_wait() -> Any:
        loss = closure()
        wait()
        return loss

    if by_name:
        return args, kwargs | {"closure": closure_then_wait}
    return (args[0], closure_then_wait, *args[2:]), kwargs


def require_attributes(path: str, item: object, state: Any) -> None:
    """Raise DamagedCheckpoint if a state, set as attributes, would replace code or another object."""
    if not isinstance(state, Mapping):
        raise DamagedCheckpoint(MANIFEST, f"state.{path} is not the state of a {type(item).__name__}")
    own: Mapping[str, Any] = item.state_dict() if isinstance(item, Stateful) else attributes(item)
    for name in state.keys() - own.keys():
        if name in attributes(item) or _is_code(inspect.getattr_static(type(item), name, None)):
            raise DamagedCheckpoint(MANIFEST, f"state.{path}.{name} is not a value of a {type(item).__name__}")
    for name in state.keys() & own.keys():
        if callable(own[name]):
            raise IncompatibleCheckpoint(f"{path}.{name} is a function here and a value in the checkpoint")
    for name in ("_schedulers", "lr_lambdas"):  # each loads its part of the state in turn
        if inner := attributes(item).get(name):
            if not isinstance(state.get(name), list) or len(state[name]) != len(inner):
                raise IncompatibleCheckpoint(f"{path}.{name}: {len(inner)} here, another number in the checkpoint")
            for number, saved in enumerate(state[name]):
                if saved is not None:
                    require_attributes(f"{path}.{name}.{number}", inner[number], saved)
    if state.get("_scale_fn_custom") is not None:
        require_attributes(
            f"{path}._scale_fn_custom", attributes(item).get("_scale_fn_custom"), state["_scale_fn_custom"]
        )


def _is_code(attribute: object) -> bool:
    return callable(attribute) or hasattr(type(attribute), "__get__")
