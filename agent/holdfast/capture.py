"""Capture again what was captured before, without walking all of it.

Between two checkpoints a model and its optimizer change their numbers, rarely their names, shapes or memory.
A watch remembers every leaf that a first, full capture met; as long as the same objects still lie at the same
addresses, their names and trees hold, and what is left to do at the boundary takes a millisecond or two for
hundreds of tensors: most of that is waiting for objects that an iteration has driven out of the caches.
Whatever a watch cannot vouch for is walked in full each time.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import nn

from holdfast.sharding import is_sharded, local

PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)
"""Types whose memory is what `data_ptr` says: no wrapper."""
IMMUTABLE = (type(None), bool, int, float, str)


class Watch(Protocol):
    """Tells whether an object is made of the same parts as when it was captured in full."""

    def leaves(self) -> list[Any]:
        """All that its tree was made from, in an order that does not change."""
        ...

    def outline(self) -> tuple[object, ...]:
        """What of its make-up can be had in some microseconds."""
        ...


class ModuleWatch:
    def __init__(self, module: nn.Module) -> None:
        self.parameters = list(module.named_parameters())
        """By name, as the module has them as long as nothing has changed."""
        found = ((each._parameters, name) for each in module.modules() for name in each._parameters)
        self._first: tuple[dict[str, nn.Parameter | None], str] = next(found, ({}, ""))
        # a dict that is empty today may get an entry tomorrow, so all of them are watched
        self._dicts: list[dict[Any, Any]] = [
            held
            for each in module.modules()
            for held in (
                each._modules,
                each._parameters,
                each._buffers,
                each._state_dict_hooks,
                each._state_dict_pre_hooks,
            )
        ]

    @staticmethod
    def vouches_for(module: nn.Module) -> bool:
        return all(_is_plain_module(each) for each in module.modules())

    def leaves(self) -> list[Any]:
        return list(itertools.chain.from_iterable(map(dict.values, self._dicts)))

    def outline(self) -> tuple[object, ...]:
        """Weights are exchanged as a whole (for those of an average, say): the first shows it."""
        held = self._first[0].get(self._first[1])
        return () if held is None else (id(held), held.data_ptr())


class OptimizerWatch:
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    @staticmethod
    def vouches_for(optimizer: torch.optim.Optimizer) -> bool:
        if type(optimizer).state_dict is not torch.optim.Optimizer.state_dict:
            return False
        if optimizer._optimizer_state_dict_pre_hooks or optimizer._optimizer_state_dict_post_hooks:
            return False
        return all(
            isinstance(parameter, torch.Tensor) and type(values) is dict and all(map(_is_leaf, values.values()))
            for parameter, values in optimizer.state.items()
        )

    def leaves(self) -> list[Any]:
        state, groups = self._optimizer.state, self._optimizer.param_groups
        hooks = self._optimizer._optimizer_state_dict_pre_hooks, self._optimizer._optimizer_state_dict_post_hooks
        values = itertools.chain.from_iterable(entry.values() for entry in state.values())
        trained = itertools.chain.from_iterable(group["params"] for group in groups)
        return [*state, *values, *trained, len(groups), *hooks[0].values(), *hooks[1].values()]

    def outline(self) -> tuple[object, ...]:
        """A parameter that is added late shows here, and a state that was loaded or exchanged."""
        state, groups = self._optimizer.state, self._optimizer.param_groups
        first = map(id, next(iter(state.values()), {}).values())
        return id(state), len(state), *first, *(len(group["params"]) for group in groups)

    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups as `state_dict()` gives them: parameters by their number."""
        start, packed = 0, []
        for group in self._optimizer.param_groups:
            end = start + len(group["params"])
            rest = {key: value for key, value in group.items() if key != "params"}
            packed.append({**rest, "params": list(range(start, end))})
            start = end
        return packed


class Watched:
    """Several objects under watch together, as they were at a full capture."""

    def __init__(self, watches: Iterable[Watch]) -> None:
        self._watches = list(watches)
        self._leaves = self._all_leaves()
        self._outline = self._whole_outline()
        # a parameter is a leaf of its module and of its optimizer, there as a key and in its group
        self._tensors = list({id(leaf): leaf for leaf in self._leaves if isinstance(leaf, torch.Tensor)}.values())
        self._sharded = [tensor for tensor in self._tensors if is_sharded(tensor)]
        self._tensors = [tensor for tensor in self._tensors if not is_sharded(tensor)]
        self._places = self._all_places()
        self.steady = all(type(tensor) in PLAIN for tensor in self._tensors)
        """There is nothing among them whose memory cannot be told by its address."""
        self.rests = not self._sharded
        """Outside an update they are as they are: `fully_shard` puts others in their place for a forward pass."""

    def seems_unchanged(self) -> bool:
        """As far as it takes no time to tell."""
        return self._whole_outline() == self._outline

    def unchanged(self) -> bool:
        leaves = self._all_leaves()
        return (
            len(leaves) == len(self._leaves)
            and all(map(operator.is_, leaves, self._leaves))
            and self._all_places() == self._places
        )

    def _all_places(self) -> list[tuple[object, ...]]:
        """A tensor whose `data` was set may be another view of the same memory."""
        parts = [*self._tensors, *map(local, self._sharded)] if self._sharded else self._tensors
        return [(tensor.data_ptr(), tensor.shape, tensor.stride()) for tensor in parts]

    def _whole_outline(self) -> list[tuple[object, ...]]:
        return [watch.outline() for watch in self._watches]

    def _all_leaves(self) -> list[Any]:
        return list(itertools.chain.from_iterable(watch.leaves() for watch in self._watches))


def watch_of(item: object) -> ModuleWatch | OptimizerWatch | None:
    """None for what has to be captured in full each time."""
    if isinstance(item, nn.Module):
        return ModuleWatch(item) if ModuleWatch.vouches_for(item) else None
    if isinstance(item, torch.optim.Optimizer):
        return OptimizerWatch(item) if OptimizerWatch.vouches_for(item) else None
    return None


def _is_leaf(value: object) -> bool:
    # a list would be the same object when its contents have changed
    return isinstance(value, torch.Tensor) or type(value) in IMMUTABLE


def _is_plain_module(module: nn.Module) -> bool:
    kind = type(module)
    return (
        kind.state_dict is nn.Module.state_dict
        and kind._save_to_state_dict is nn.Module._save_to_state_dict
        and kind.get_extra_state is nn.Module.get_extra_state
        and not module._state_dict_hooks
        and all(map(only_reshards, module._state_dict_pre_hooks.values()))
    )


def only_reshards(hook: object) -> bool:
    """That of `fully_shard`: where an iteration ends there is nothing left for it to do."""
    name = getattr(hook, "__module__", ""), getattr(hook, "__qualname__", "")
    return name[0].startswith("torch.distributed.fsdp.") and name[1].endswith(".to_sharded_hook")
