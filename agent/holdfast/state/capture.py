"""Detection of structural changes since the last capture, so that not all state is encoded again.

Between two checkpoints a model and its optimizer change their numbers, but rarely their names, shapes or memory. A
watch remembers every leaf of a full capture. While the same objects are at the same addresses, their names and
trees are valid, and a capture takes a millisecond or two for hundreds of tensors, most of it cache misses. Objects
that cannot be watched are encoded in full each time.
"""

from __future__ import annotations

import itertools
import marshal
import operator
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import nn

from holdfast.state.sharding import is_sharded, local
from holdfast.torch_internals import contents_of, has_plain_state_dict, state_dict_hooks

PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)
"""Types whose memory is at `data_ptr`: no wrappers."""
IMMUTABLE = (type(None), bool, int, float, str)


class Watch(Protocol):
    """Gives the parts of an object, to detect that it consists of others than at the full capture."""

    def leaves(self) -> list[Any]:
        """Return all that the object's tree was made from, in a fixed order."""
        ...


class ModuleWatch:
    def __init__(self, module: nn.Module) -> None:
        self.parameters = list(module.named_parameters())
        """Names and parameters, valid while nothing has changed."""
        # an empty dict may get an entry later, so all are watched
        self._dicts = list(contents_of(module))

    @staticmethod
    def can_watch(module: nn.Module) -> bool:
        return all(map(has_plain_state_dict, module.modules()))

    def leaves(self) -> list[Any]:
        return list(itertools.chain.from_iterable(map(dict.values, self._dicts)))


class OptimizerWatch:
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    @staticmethod
    def can_watch(optimizer: torch.optim.Optimizer) -> bool:
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
        # some optimizers put more than the state of parameters into it; `can_watch` excludes them
        values = itertools.chain.from_iterable(e.values() if type(e) is dict else (e,) for e in state.values())
        trained = itertools.chain.from_iterable(group["params"] for group in groups)
        return [*state, *values, *trained, len(groups), *state_dict_hooks(self._optimizer)]

    def groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups as `state_dict()` does: parameters by their number."""
        start, packed = 0, []
        for group in self._optimizer.param_groups:
            end = start + len(group["params"])
            rest = {key: value for key, value in group.items() if key != "params"}
            packed.append({**rest, "params": list(range(start, end))})
            start = end
        return packed

    def settings(self) -> bytes | None:
        """Serialize the settings of the groups; `None` if they are more than numbers and strings."""
        groups = [
            (len(group["params"]), [pair for pair in group.items() if pair[0] != "params"])
            for group in self._optimizer.param_groups
        ]
        # unlike ==, marshal distinguishes 1, 1.0 and True; it takes arrays for bytes, which `_is_simple` excludes
        return marshal.dumps(groups, 2) if _is_simple(groups) else None


class WatchedState:
    """Several objects with their parts at a full capture."""

    def __init__(self, watches: Iterable[Watch]) -> None:
        self._watches = list(watches)
        self._leaves = list(self._all_leaves())
        # a parameter is a leaf of its module and of its optimizer, there as a key and in its group
        self._tensors = list({id(leaf): leaf for leaf in self._leaves if isinstance(leaf, torch.Tensor)}.values())
        self._sharded = [tensor for tensor in self._tensors if is_sharded(tensor)]
        self._tensors = [tensor for tensor in self._tensors if not is_sharded(tensor)]
        self._places = list(self._current_places())
        self.is_watchable = all(type(tensor) in PLAIN for tensor in self._tensors)
        """All tensors have their memory at `data_ptr`, so that a change of address shows."""

    def unchanged(self) -> bool:
        leaves = list(self._all_leaves())
        return (
            len(leaves) == len(self._leaves)
            and all(map(operator.is_, leaves, self._leaves))
            and all(map(operator.eq, self._current_places(), self._places))
        )

    def _current_places(self) -> Iterator[tuple[int, torch.Size, tuple[int, ...]]]:
        """Address, shape and strides of each tensor: `data` that was set may be another view of the same memory.

        One pass, since training waits for it and the tensors are not in the caches. It keeps nothing, since
        thousands of new tuples would start the garbage collector.
        """
        kind = torch.Tensor
        tensors = [*self._tensors, *map(local, self._sharded)] if self._sharded else self._tensors
        return zip(map(kind.data_ptr, tensors), map(kind.size, tensors), map(kind.stride, tensors), strict=True)

    def _all_leaves(self) -> Iterator[Any]:
        return itertools.chain.from_iterable(watch.leaves() for watch in self._watches)


def watch_of(item: object) -> ModuleWatch | OptimizerWatch | None:
    """Return a watch; `None` for an object that must be encoded in full each time."""
    if isinstance(item, nn.Module):
        return ModuleWatch(item) if ModuleWatch.can_watch(item) else None
    if isinstance(item, torch.optim.Optimizer):
        return OptimizerWatch(item) if OptimizerWatch.can_watch(item) else None
    return None


def _is_leaf(value: object) -> bool:
    # a list stays the same object when its contents change
    return isinstance(value, torch.Tensor) or type(value) in IMMUTABLE


def _is_simple(value: object) -> bool:
    """Whether a value consists of numbers and strings only."""
    kind = type(value)
    return kind in IMMUTABLE or (kind in (tuple, list) and all(map(_is_simple, value)))  # type: ignore[call-overload]
