"""Capture again what was captured before, without walking all of it.

Between two checkpoints a model and its optimizer change their numbers, rarely their names, shapes or memory.
A watch remembers every leaf that a first, full capture met; as long as the same objects still lie at the same
addresses, their names and trees hold, and what is left to do at the boundary takes a millisecond or two for
hundreds of tensors: most of that is waiting for objects that an iteration has driven out of the caches.
Whatever a watch cannot vouch for is walked in full each time.
"""

from __future__ import annotations

import itertools
import marshal
import operator
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import nn

from holdfast.state.sharding import is_sharded, local
from holdfast.torch_internals import contents_of, has_plain_state_dict, state_dict_hooks

PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)
"""Types whose memory is what `data_ptr` says: no wrapper."""
IMMUTABLE = (type(None), bool, int, float, str)


class Watch(Protocol):
    """Tells whether an object is made of the same parts as when it was captured in full."""

    def leaves(self) -> list[Any]:
        """All that its tree was made from, in an order that does not change."""
        ...


class ModuleWatch:
    def __init__(self, module: nn.Module) -> None:
        self.parameters = list(module.named_parameters())
        """By name, as the module has them as long as nothing has changed."""
        # a dict that is empty today may get an entry tomorrow, so all of them are watched
        self._dicts = list(contents_of(module))

    @staticmethod
    def vouches_for(module: nn.Module) -> bool:
        return all(map(has_plain_state_dict, module.modules()))

    def leaves(self) -> list[Any]:
        return list(itertools.chain.from_iterable(map(dict.values, self._dicts)))


class OptimizerWatch:
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    @staticmethod
    def vouches_for(optimizer: torch.optim.Optimizer) -> bool:
        if type(optimizer).state_dict is not torch.optim.Optimizer.state_dict:
            return False
        if state_dict_hooks(optimizer):
            return False
        return all(
            isinstance(parameter, torch.Tensor) and type(values) is dict and all(map(_is_leaf, values.values()))
            for parameter, values in optimizer.state.items()
        )

    def leaves(self) -> list[Any]:
        state, groups = self._optimizer.state, self._optimizer.param_groups
        values = itertools.chain.from_iterable(entry.values() for entry in state.values())
        trained = itertools.chain.from_iterable(group["params"] for group in groups)
        return [*state, *values, *trained, len(groups), *state_dict_hooks(self._optimizer)]

    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups as `state_dict()` gives them: parameters by their number."""
        start, packed = 0, []
        for group in self._optimizer.param_groups:
            end = start + len(group["params"])
            rest = {key: value for key, value in group.items() if key != "params"}
            packed.append({**rest, "params": list(range(start, end))})
            start = end
        return packed

    def settings(self) -> bytes | None:
        """What the groups say beside their parameters; None where that is more than numbers and words."""
        groups = [
            (len(group["params"]), [pair for pair in group.items() if pair[0] != "params"])
            for group in self._optimizer.param_groups
        ]
        # marshal tells 1 from 1.0 and from True, as comparing does not; it takes arrays for bytes
        return marshal.dumps(groups, 2) if _is_simple(groups) else None


class Watched:
    """Several objects under watch together, as they were at a full capture."""

    def __init__(self, watches: Iterable[Watch]) -> None:
        self._watches = list(watches)
        self._leaves = self._all_leaves()
        # a parameter is a leaf of its module and of its optimizer, there as a key and in its group
        self._tensors = list({id(leaf): leaf for leaf in self._leaves if isinstance(leaf, torch.Tensor)}.values())
        self._sharded = [tensor for tensor in self._tensors if is_sharded(tensor)]
        self._tensors = [tensor for tensor in self._tensors if not is_sharded(tensor)]
        self._places = self._all_places()
        self.steady = all(type(tensor) in PLAIN for tensor in self._tensors)
        """There is nothing among them whose memory cannot be told by its address."""

    def unchanged(self) -> bool:
        leaves = self._all_leaves()
        return (
            len(leaves) == len(self._leaves)
            and all(map(operator.is_, leaves, self._leaves))
            and self._all_places() == self._places
        )

    def _all_places(self) -> tuple[list[object], ...]:
        """A tensor whose `data` was set may be another view of the same memory."""
        parts = [*self._tensors, *map(local, self._sharded)] if self._sharded else self._tensors
        kind = torch.Tensor
        return [*map(kind.data_ptr, parts)], [*map(kind.size, parts)], [*map(kind.stride, parts)]

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


def _is_simple(value: object) -> bool:
    """Made of numbers and words alone, which hold no tensor."""
    kind = type(value)
    return kind in IMMUTABLE or (kind in (tuple, list) and all(map(_is_simple, value)))  # type: ignore[call-overload]
