"""Averages and copies of weights in variables of the script that no checkpoint holds.

Nothing found is kept, only its path and marks: what the script frees, it frees.
"""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Iterator
from typing import Any

import torch

from holdfast.inventory.attribute_walk import is_ignored, is_walked, split_names, words_of
from holdfast.inventory.missing_state import objects_referred_to, unused_keyword
from holdfast.inventory.script_code import script_frames
from holdfast.state.capture import PLAIN
from holdfast.state.references import attributes, entries, length
from holdfast.state.registry import CapturedState, Registry
from holdfast.state.variables import Variables
from holdfast.torch_internals import version_of

MOST_CAPTURES = 64
MOST_VARIABLES = 1000
MOST_ENTRIES = 64
MOST_TENSORS = 4
_WORDS = split_names("ema swa averaged average averages avg shadow teacher target")
_OTHER_WORDS = split_names("grad grads gradient gradients loss losses meter meters metric metrics")


class WeightCopies:
    """Compares, at some checkpoints, variables that are named as averages or copies of the model's weights."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._captures = 0
        self._marks: dict[str, Any] = {}
        self._reported: set[str] = set()

    def begin(self) -> list[str]:
        """Note the marks at the end of the first iteration; return no message."""
        if not self._saves_one():
            self._marks = {path: _marks(*each) for path, *each in self._found()}
        return []

    def captured(self, state: CapturedState) -> list[str]:
        """Describe, once each, what has changed since it was looked at last and this state does not hold."""
        self._captures += 1
        is_due = not self._captures & (self._captures - 1) and self._captures <= MOST_CAPTURES
        if not is_due or self._saves_one():
            return []
        before, now = self._marks, {path: each for path, *each in self._found()}
        self._marks = {path: _marks(*each) for path, each in now.items()}
        changed = [
            path
            for path, marks in self._marks.items()
            if path in before
            and marks[0] == before[path][0]
            and marks != before[path]
            and path not in self._reported
        ]
        if not changed:
            return []
        self._reported.update(changed)
        held = {each.untyped_storage().data_ptr() for each in state.whole.values() if type(each) in PLAIN}
        referred = {id(each) for each in objects_referred_to(self._registry.given)}
        keyword = unused_keyword("ema", self._registry.given)
        return [
            f"training changes {path} ({type(now[path][0]).__name__}), an average or copy of weights that is in "
            f"no checkpoint: a resume begins it anew. Give it to the session, Session({keyword}=...), or keep its "
            "tensors in holdfast.Variables"
            for path in changed
            if id(now[path][0]) not in referred
            and not any(each.untyped_storage().data_ptr() in held for each in now[path][1] if type(each) in PLAIN)
        ]

    def _saves_one(self) -> bool:
        """Whether the session saves an average: others may be computed from it."""
        names = [
            name
            for keyword, item in self._registry.given.items()
            for name in (keyword, type(item).__name__, *(item.state_dict() if isinstance(item, Variables) else ()))
        ]
        return bool(words_of("_".join(names)) & _WORDS)

    def _found(self) -> Iterator[tuple[str, Any, list[torch.Tensor]]]:
        """Yield variables with tensors that all have shapes as parameters of the given model, by path."""
        own = [each for item in self._registry.modules.values() for each in item.parameters()]
        shapes, known = {each.shape for each in own}, {id(each) for each in own}
        given = {id(each) for each in self._registry.given.values()}
        for path, value in _variables():
            if id(value) not in given and _is_named_so(path, value):
                within = (each for each in _tensors(value, 2) if each.dim() and id(each) not in known)
                tensors = list(itertools.islice(within, MOST_TENSORS))
                if tensors and all(each.shape in shapes for each in tensors):
                    yield path, value, tensors


def _variables() -> Iterator[tuple[str, Any]]:
    """Yield the variables of the script's frames, what its functions enclose, and attributes of its objects."""
    frames = script_frames(lambda code: (*code.co_varnames, *code.co_cellvars, *code.co_freevars, *code.co_names))
    named = itertools.chain.from_iterable(frame.values.items() for frame in frames)
    for name, value in itertools.islice(named, MOST_VARIABLES):
        yield name, value
        function = getattr(value, "func", value) if type(value) is functools.partial else value
        if isinstance(function, types.MethodType):
            yield name, function.__self__
        elif isinstance(function, types.FunctionType):
            for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
                try:
                    yield f"{name}.{variable}", cell.cell_contents
                except ValueError:  # not assigned yet
                    continue
        elif not isinstance(value, (torch.nn.Module, Variables)) and is_walked(type(value)):
            own = attributes(value)
            yield from ((f"{name}.{each}", own[each]) for each in tuple(own)[:MOST_ENTRIES])


def _is_named_so(path: str, value: Any) -> bool:
    kind = type(value)
    is_holder = isinstance(value, (torch.nn.Module, dict, list)) or is_walked(kind)
    if not is_holder or kind.__module__.startswith("holdfast.") or is_ignored(path.rpartition(".")[2]):
        return False
    words = words_of(f"{kind.__name__}_{path.replace('.', '_')}")
    return bool(words & _WORDS) and not words & _OTHER_WORDS


def _tensors(value: Any, depth: int) -> Iterator[torch.Tensor]:
    """Yield the tensors of a module, list, dict or object of the script."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, torch.nn.Module):
        yield from value.parameters()
    elif depth and isinstance(value, (dict, list)) and length(value):
        for _, entry in itertools.islice(entries(value), MOST_ENTRIES):
            yield from _tensors(entry, depth - 1)
    elif depth and is_walked(type(value)):
        for entry in tuple(attributes(value).values())[:MOST_ENTRIES]:
            yield from _tensors(entry, depth - 1)


def _marks(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return what changes with the tensors, without a call to a device."""
    return id(value), [(id(each), version_of(each), _first(each)) for each in tensors]


def _first(tensor: torch.Tensor) -> float | None:
    """Return the first element in host memory: `.data` changes no version."""
    if type(tensor) not in PLAIN or tensor.device.type != "cpu" or not tensor.numel():
        return None
    return tensor.detach()[(0,) * tensor.dim()].item()
