"""Generators and averages in variables of the script that no given object refers to."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from holdfast.data.reachable import is_global_generator, parts_in_process, reachable
from holdfast.inventory.attribute_walk import OF_LOADERS, describer_of, is_walked, words_of
from holdfast.inventory.enclosed_state import enclosed_values, generators_in, is_function, tensors_of
from holdfast.inventory.missing_state import MOST_ENTRIES, generators_referred_to, objects_referred_to
from holdfast.inventory.script_code import script_frames
from holdfast.state.references import attributes
from holdfast.state.registry import Registry
from holdfast.state.rng import is_generator
from holdfast.state.variables import Variables
from holdfast.torch_internals import version_of

COMPARED_ITERATIONS = (1, 2, 3)
"""A generator that changes in each of these iterations is a part of training."""
LATER_ITERATIONS = (12, 48, 192, 768)
"""Iterations after which averages are compared again: some begin late."""
MOST_VARIABLES = 2000
MOST_OBJECTS = 32
_AVERAGES = frozenset({"ema", "swa", "averaged"})
"""Words for running averages of weights."""


def saved_generators(loaders: Iterable[Any]) -> set[int]:
    """Return the identities of the generators that are saved with the positions of loaders."""
    parts = (part for loader in loaders for part in _parts_of(loader).items())
    found = (each for name, part in parts for _, each in reachable(name, part, by_name=True))
    return {id(each) for each in found if is_generator(each)}


def _parts_of(loader: Any) -> Mapping[str, Any]:
    if isinstance(loader, torch.utils.data.DataLoader):
        return parts_in_process(loader)
    own = attributes(loader)
    names = ("dataset", "collate_fn", "_given_sampler", "_given_batch_sampler", "generator")
    return {name: own[name] for name in names if own.get(name) is not None} or {"loader": loader}


def functions_of_loaders(loaders: Iterable[Any]) -> dict[str, Any]:
    """Return the functions of loaders without workers, such as collate functions and transforms, by path."""
    found: dict[str, Any] = {}
    for number, loader in enumerate(loaders, start=1):
        if getattr(loader, "num_workers", 0):
            continue
        root = f"{OF_LOADERS}{number if number > 1 else ''}"
        own = attributes(loader)
        dataset = attributes(own.get("dataset"))
        values = {f"{root}.collate_fn": own.get("collate_fn")}
        values |= {f"{root}.dataset.{name}": each for name, each in tuple(dataset.items())}
        found |= {path: each for path, each in values.items() if is_function(each)}
    return found


class _Candidate(NamedTuple):
    path: str
    item: Any
    states: list[Any]


class ScriptVariables:
    """Compares what variables of the script refer to after the first iterations. For the training thread.

    `compared` returns the identities of the generators that given objects refer to, and that are compared as such.
    """

    def __init__(self, registry: Registry, compared: Callable[[], Collection[int]]) -> None:
        self._registry, self._compared = registry, compared
        self._generators: list[_Candidate] = []
        self._averages: list[_Candidate] = []
        self.wakes_at = COMPARED_ITERATIONS[0]
        """Iteration after which `found` is to be called."""
        self._left = [*COMPARED_ITERATIONS, *LATER_ITERATIONS]

    def found(self, iteration: int, loaders: Callable[[], Collection[Any]]) -> list[str]:
        """Describe, once each, what the last iterations have changed and no checkpoint holds."""
        if not self._left or iteration < self.wakes_at:
            return []
        while self._left and self._left[0] <= iteration:
            self._left.pop(0)
        self.wakes_at = self._left[0] if self._left else 1 << 62
        if iteration == COMPARED_ITERATIONS[0]:
            self._search(loaders())
        for each in (*self._generators, *self._averages):
            each.states.append(_state_of(each.item))
        found: list[str] = []
        if iteration == COMPARED_ITERATIONS[-1]:
            found += self._drawn_from(loaders())
            self._generators = []
        if iteration >= COMPARED_ITERATIONS[-1]:
            found += self._changed_averages()
            if not self._averages:
                self._left, self.wakes_at = [], 1 << 62
        return found

    def _search(self, loaders: Collection[Any]) -> None:
        seen: set[int] = set()
        for path, value in _variables():
            if id(value) in seen or value is self._registry:
                continue
            seen.add(id(value))
            if len(self._generators) < MOST_OBJECTS and is_generator(value):
                self._generators.append(_Candidate(path, value, []))
            elif is_function(value):
                found = [_Candidate(each.path + each.name, each.value, []) for each in generators_in(path, value)]
                self._generators += found[:MOST_OBJECTS]
                found = [
                    _Candidate(each.path + each.name, each.value, [])
                    for each in enclosed_values(path, value)
                    if _is_average(each.name, each.value)
                ]
                self._averages += found[:MOST_OBJECTS]
            elif _is_average(path, value) and len(self._averages) < MOST_OBJECTS:
                self._averages.append(_Candidate(path, value, []))

    def _drawn_from(self, loaders: Collection[Any]) -> Iterator[str]:
        given = self._registry.given
        known = {id(each) for each in (*given.values(), *generators_referred_to(given))}
        known |= saved_generators(loaders) | set(self._compared())
        held = [repr(each) for each in _values_of(_variables_given(given))]
        named = set()
        for path, item, states in self._generators:
            if id(item) in known or id(item) in named or is_global_generator(item) or len(states) < 3:
                continue
            first, second, third = states
            if first[:2] in (second[:2], third[:2]) or second[:2] == third[:2] or first[2:] != third[2:]:
                continue  # not in each iteration, or it gets a seed for each
            if isinstance(item, torch.Generator) and repr(item.get_state()) in held:
                continue
            named.add(id(item))
            yield (
                f"each iteration draws from {path} ({type(item).__name__}), which is in no checkpoint: a resume "
                "repeats its first numbers. Give it to the session, Session(generator=...)"
            )

    def _changed_averages(self) -> Iterator[str]:
        given = self._registry.given
        known = {id(each) for each in (*given.values(), *objects_referred_to(given))}
        held = _storages(
            itertools.chain.from_iterable(tensors_of(each) for each in (*given.values(), *_variables_given(given)))
        )
        left = []
        for each in self._averages:
            if id(each.item) in known or _storages(tensors_of(each.item)) & held:
                continue
            if each.states[0] == each.states[-1]:
                left.append(each)
                continue
            yield (
                f"training changes {each.path} ({type(each.item).__name__}), an average of weights that is in no "
                "checkpoint: a resume begins it anew. Give it to the session, Session(ema=...), or keep its "
                "tensors in holdfast.Variables"
            )
        self._averages = left


def _variables() -> Iterator[tuple[str, Any]]:
    """Yield the variables of the script's frames, and the attributes of its objects, with their paths."""
    objects: list[tuple[str, Any]] = []
    count = 0
    frames = script_frames(
        lambda code: (*code.co_varnames, *code.co_cellvars, *code.co_freevars, *code.co_names),
        beyond_libraries=True,
    )
    for frame in frames:
        for name, value in frame.values.items():
            count += 1
            if count > MOST_VARIABLES:
                return
            yield name, value
            is_other = isinstance(value, (torch.nn.Module, types.ModuleType, Variables))
            if not is_other and not is_function(value) and is_walked(type(value)):
                objects.append((name, value))
    for path, item in objects[:MOST_OBJECTS]:
        own = attributes(item)
        if len(own) <= MOST_ENTRIES:
            yield from ((f"{path}.{name}", value) for name, value in tuple(own.items()))


def _is_average(path: str, value: Any) -> bool:
    """Whether a value is an average of weights, as its type or name says."""
    kind = type(value)
    is_holder = issubclass(kind, torch.nn.Module) or issubclass(kind, (dict, list)) or is_walked(kind)
    words = words_of(kind.__name__) | words_of(path.rpartition(".")[2])
    if not is_holder or kind.__module__.startswith("holdfast.") or not words & _AVERAGES:
        return False
    return sum(1 for each in itertools.islice(tensors_of(value), 8) if each.dim()) > 0


def _state_of(item: Any) -> Any:
    """Return what changes when a generator draws, or an average is updated."""
    if is_generator(item):
        describe = describer_of(type(item))
        return describe(item) if describe is not None else ()
    tensors = itertools.islice((each for each in tensors_of(item) if each.is_floating_point() and each.dim()), 4)
    return [(id(each), version_of(each)) for each in tensors]


def _storages(tensors: Iterable[torch.Tensor]) -> set[int]:
    return {each.untyped_storage().data_ptr() for each in tensors if each.layout is torch.strided and each.numel()}


def _variables_given(given: Mapping[str, Any]) -> list[Any]:
    return [each.state_dict() for each in given.values() if isinstance(each, Variables)]


def _values_of(states: list[Any]) -> Iterator[Any]:
    return itertools.chain.from_iterable(tensors_of(each) for each in states)
