"""What objects of the script refer to, read from `__dict__`, slots and builtin containers: no property is run."""

from __future__ import annotations

import collections
import functools
import gc
import itertools
import sys
import sysconfig
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

CONTAINERS = (dict, list, tuple, set, frozenset, collections.deque)
_LEAVES = (torch.Tensor, str, bytes, bytearray, int, float, complex, type, types.ModuleType)
_CACHED_TYPES = 4096
_NESTED_CODE = 4
"""How many functions within functions deep names are looked for."""
_PLAIN = (str, bytes, int, float, bool, type(None))
_CACHE_ELEMENT = "_lru_list_elem"
CACHING_FUNCTION = type(functools.lru_cache(lambda: None))
_STANDARD_LIBRARY = tuple({f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib")})


def walk(
    path: str,
    item: Any,
    parts: Callable[[Any], Iterable[tuple[str, Any]]],
    depth: int,
    *,
    most: int = sys.maxsize,
    without: object = None,
) -> Iterator[tuple[str, Any]]:
    """Yield an object and what it refers to, with paths; the nearest first, each object once.

    Args:
        path: path of the object, with which the others begin.
        parts: returns what an object refers to, with the end of each path.
        depth: how many references deep the walk goes.
        most: number of objects from which on no other object is entered.
        without: an object to leave out.
    """
    seen, left = {id(item), id(without)}, collections.deque([(path, item, 0)])
    while left:
        path, item, level = left.popleft()
        yield path, item
        if level == depth or len(seen) > most:
            continue
        for name, value in parts(item):
            if id(value) not in seen and not _is_leaf(value):
                seen.add(id(value))
                left.append((path + name, value, level + 1))


def _is_leaf(value: Any) -> bool:
    try:
        return value is None or isinstance(value, _LEAVES)
    except Exception:  # the class of a proxy that has no object yet
        return True


def attributes(item: Any) -> Mapping[str, Any]:
    """Return the `__dict__` of an object or class; empty if it has none."""
    try:
        found = object.__getattribute__(item, "__dict__")
    except AttributeError:
        return {}
    return found if isinstance(found, Mapping) else {}


def slots(item: Any) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of the slots that are assigned."""
    for name, slot in _slots_of(type(item)):
        try:
            yield name, slot.__get__(item)
        except AttributeError:
            continue


def _find_slots(kind: type) -> list[tuple[str, Any]]:
    members = itertools.chain.from_iterable(vars(base).items() for base in kind.__mro__)
    return [(name, each) for name, each in members if isinstance(each, types.MemberDescriptorType)]


_slots_of: Callable[[type], list[tuple[str, Any]]] = functools.lru_cache(_CACHED_TYPES)(_find_slots)


def container_type(value: Any) -> Any:
    """Return the builtin type of a container, whose methods run no code of a subclass."""
    return next(each for each in CONTAINERS if issubclass(type(value), each))


def length(container: Any) -> int:
    return int(container_type(container).__len__(container))


def entries(container: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the keys or numbers of a container's entries, and the entries."""
    kind = container_type(container)
    return iter(dict.items(container)) if kind is dict else enumerate(kind.__iter__(container))


def entry_name(key: Any) -> str:
    """Return how a path names an entry."""
    try:
        return f"[{key!r}]"
    except Exception:  # code of the script
        return f"[{type(key).__name__} {id(key):x}]"


@functools.lru_cache(_CACHED_TYPES)
def is_installed(path: str) -> bool:
    """Whether a source file is one of Python or of an installed package, not of the script."""
    return "site-packages" in path or "dist-packages" in path or path.startswith(("<frozen", *_STANDARD_LIBRARY))


def enclosed(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the variables of enclosing functions that a function uses, and its defaults."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield f".{name}", cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    yield from ((".__defaults__", function.__defaults__), (".__kwdefaults__", function.__kwdefaults__))


def names_in(code: types.CodeType, depth: int = _NESTED_CODE) -> Iterator[str]:
    """Yield the names of globals and attributes that code uses, also within lambdas and comprehensions."""
    yield from code.co_names
    for each in code.co_consts if depth else ():
        if isinstance(each, types.CodeType):
            yield from names_in(each, depth - 1)


def cached_values(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield the values that a function of `functools.lru_cache` keeps, by the arguments of the calls."""
    referents = gc.get_referents(function)
    wrapped = attributes(function).get("__wrapped__")
    last = next((place for place, each in enumerate(referents) if each is wrapped), 0)
    found: list[tuple[Any, Any]] = []
    for place, each in enumerate(referents[:last]):
        if type(each) is dict:  # of a cache without a limit; otherwise it has elements without references
            found += [item for item in tuple(each.items()) if type(item[1]).__name__ != _CACHE_ELEMENT]
        elif type(each) is type and each.__name__ == _CACHE_ELEMENT and place >= 2:
            found.append((referents[place - 2], referents[place - 1]))
    yield from ((f".cached{_arguments_name(key, number)}", value) for number, (key, value) in enumerate(found))


def _arguments_name(key: Any, number: int) -> str:
    parts = [each for each in (key if type(key) is tuple else (key,)) if type(each) is not object]
    return f"{tuple(parts)!r}" if all(type(each) in _PLAIN for each in parts) else f"[{number}]"


def cycled_items(cycle: Any) -> Iterator[tuple[str, Any]]:
    """Yield what `itertools.cycle` repeats: the items of a list, else its iterator and what it has given."""
    referents = gc.get_referents(cycle)
    sources = [
        source
        for each in referents
        if hasattr(type(each), "__next__") and type(each).__module__ == "builtins"
        for source in gc.get_referents(each)
        if type(source) in (list, tuple)
    ]
    lists = sources or [each for each in referents if type(each) is list]
    yield from ((entry_name(number), item) for each in lists[:1] for number, item in enumerate(each))
    yield from ((".iterator", each) for each in referents if hasattr(type(each), "__next__") and not sources)


def place_in_cycle(cycle: Any) -> tuple[int, int] | None:
    """Return how many items `itertools.cycle` has given since its first one, and how many it repeats, if known."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            _, (source,), (given, is_repeating) = cycle.__reduce__()
        if type(source).__name__ not in ("list_iterator", "tuple_iterator"):
            return None
        _, (items, *_), *place = source.__reduce__()
    except (TypeError, ValueError, AttributeError):  # another version of Python
        return None
    start = place[0] if place else 0
    if is_repeating:
        return start % max(1, len(given)), len(given)
    return len(given), len(items) if place else len(given)
