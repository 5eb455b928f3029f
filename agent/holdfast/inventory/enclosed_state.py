"""State that is reachable only through functions: closures, partial functions, caches and `itertools.cycle`."""

from __future__ import annotations

import collections
import dis
import functools
import itertools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.optim.lr_scheduler import LRScheduler

from holdfast.state.references import (
    CACHING_FUNCTION,
    attributes,
    cached_values,
    cycled_items,
    enclosed,
    entries,
    entry_name,
    is_installed,
    length,
    place_in_cycle,
)
from holdfast.state.rng import is_generator

DEPTH = 6
"""How many functions and lists deep it is looked for."""
MOST_FUNCTIONS = 64
MOST_ENTRIES = 64
PLACE = "place"
"""Name for the place of `itertools.cycle`."""
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial, CACHING_FUNCTION, itertools.cycle)
_CONTAINERS = (dict, list, collections.deque)


class EnclosedValue(NamedTuple):
    path: str
    """Path of the function."""
    function: Any
    name: str
    value: Any


def is_function(value: Any) -> bool:
    """Whether values may be reachable only through it."""
    return isinstance(value, _FUNCTIONS)


def enclosed_values(path: str, item: Any) -> Iterator[EnclosedValue]:
    """Yield generators, numbers that functions change, and lists, dicts and tensors that a function refers to."""
    seen: set[int] = set()
    left = collections.deque([(path, item, 0)])
    while left and len(seen) < MOST_FUNCTIONS:
        path, item, level = left.popleft()
        if id(item) in seen or level == DEPTH:
            continue
        seen.add(id(item))
        changed = changed_variables(item.__code__) if isinstance(item, types.FunctionType) else frozenset()
        is_library = isinstance(item, types.FunctionType) and is_installed(item.__code__.co_filename)
        for name, value in parts_of_function(item):
            if is_generator(value):
                yield EnclosedValue(path, item, name, value)
            elif is_function(value) or name in (".__defaults__", ".args"):
                left.append((path + name, value, level + 1))
            elif is_library or isinstance(item, (list, tuple)):
                continue
            elif type(value) in _CONTAINERS or isinstance(value, torch.Tensor) or hasattr(type(value), "dtype"):
                yield EnclosedValue(path, item, name, value)
                left.append((path + name, value, level + 1))
            elif name == f".{PLACE}" or name[1:] in changed:
                yield EnclosedValue(path, item, name, value)


def generators_in(path: str, item: Any) -> Iterator[EnclosedValue]:
    """Yield the generators among `enclosed_values`."""
    return (each for each in enclosed_values(path, item) if is_generator(each.value))


def parts_of_function(item: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a function refers to with the end of its path; of a list or dict, its entries."""
    if isinstance(item, types.MethodType):
        yield ".__func__", item.__func__
    elif isinstance(item, types.FunctionType):
        yield from enclosed(item)
    elif isinstance(item, functools.partial):
        yield from ((".func", item.func), (".args", item.args))
        yield from ((f".{name}", value) for name, value in tuple(item.keywords.items()))
    elif isinstance(item, CACHING_FUNCTION):
        yield ".__wrapped__", attributes(item).get("__wrapped__")
        yield from cached_values(item)
    elif isinstance(item, itertools.cycle):
        yield from cycled_items(item)
        if (place := place_in_cycle(item)) is not None:
            yield f".{PLACE}", place[0] % max(1, place[1])
    elif isinstance(item, (dict, list, tuple)) and length(item) <= MOST_ENTRIES:
        yield from ((entry_name(key), value) for key, value in tuple(entries(item)))


@functools.lru_cache(1024)
def changed_variables(code: types.CodeType) -> frozenset[str]:
    """Return the variables of enclosing functions that code changes, and reads for more than the change."""
    reads: collections.Counter[str] = collections.Counter()
    stored: set[str] = set()
    for each in dis.get_instructions(code):
        if each.argval not in code.co_freevars:
            continue
        if each.opname.startswith("LOAD_"):
            reads[each.argval] += 1
        elif each.opname.startswith("STORE_"):
            reads[each.argval] -= 1
            stored.add(each.argval)
    return frozenset(name for name in stored if reads[name] > 0)


def tensors_of(value: Any, depth: int = 3) -> Iterator[torch.Tensor]:
    """Yield tensors in a module, in lists and dicts, and in attributes of an object of the script."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, torch.nn.Module):
        yield from itertools.chain(value.parameters(), value.buffers())
    elif depth and isinstance(value, (dict, list, tuple)):
        for _, entry in tuple(itertools.islice(entries(value), MOST_ENTRIES)):
            yield from tensors_of(entry, depth - 1)
    elif depth and not is_function(value):
        for entry in tuple(attributes(value).values()):
            yield from tensors_of(entry, depth - 1)


def enclosing_holder(function: Callable[[], Any], name: str) -> Callable[[], Any]:
    """Return a holder with the value that a function has now under a name."""

    def holder() -> Any:
        values = dict(parts_of_function(function()))
        return _Enclosing(**{name.strip("."): values.get(name)})

    return holder


class _Enclosing(types.SimpleNamespace):
    """What a function refers to, at one instant."""


def is_enclosed(holder: Callable[[], Any]) -> bool:
    """Whether a function refers to a value, instead of an object that has it as an attribute."""
    return isinstance(holder(), _Enclosing)


def functions_in(value: Any) -> list[Any]:
    is_small = isinstance(value, dict) and length(value) <= MOST_ENTRIES
    return [each for _, each in tuple(entries(value)) if is_function(each)] if is_small else []


def functions_of_schedules(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Return the functions of given schedules of torch, whose `state_dict` leaves them out, by path."""
    left = [(keyword, each) for keyword, each in objects.items() if isinstance(each, LRScheduler)]
    found: dict[str, Any] = {}
    while left:
        path, schedule = left.pop()
        for name, value in attributes(schedule).items():
            values = value if type(value) in (list, tuple) else (value,)
            inner = [each for each in values if isinstance(each, LRScheduler)]
            left += [(f"{path}.{name}[{number}]", each) for number, each in enumerate(inner)]
            if any(map(is_function, values)):
                found[f"{path}.{name}"] = list(values)
    return found
