"""What objects of the script refer to, read from `__dict__`, slots and builtin containers: no property is run."""

from __future__ import annotations

import collections
import functools
import itertools
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

CONTAINERS = (dict, list, tuple, set, frozenset, collections.deque)
_LEAVES = (torch.Tensor, str, bytes, bytearray, int, float, complex, type, types.ModuleType)
_CACHED_TYPES = 4096


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
