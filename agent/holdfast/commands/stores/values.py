"""What a checkpoint's state holds beside tensors, by the way to it; read as it is stored, without torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from holdfast.shards import is_module

OWN = ("rng", "session")
"""The session's own entries: nothing that a person set."""
MOST_ITEMS = 8
"""Longer lists are told by their length."""
_WORDS = ("$int", "$number", "$str", "$dtype", "$device")
_ITEMS = ("$tuple", "$size", "$set", "$frozenset", "$deque")


def values_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers and words, by path: `optimizer.param_groups.0.lr`."""
    found: dict[str, Any] = {}
    for keyword, tree in state.items():
        if keyword not in OWN:
            found |= _walk(tree["state"] if is_module(tree) else tree, keyword)
    return found


def _walk(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict):
        tag = next(iter(tree), "")
        if tag.startswith("$"):
            yield from _walk(tree["value"], path) if "value" in tree else _walk_tag(tag, tree[tag], path)
        else:
            for key, item in tree.items():
                yield from _walk(item, f"{path}.{key}")
    elif isinstance(tree, list):
        yield from _walk_items(tree, path)
    else:
        yield path, tree


def _walk_tag(tag: str, body: Any, path: str) -> Iterator[tuple[str, Any]]:
    if tag in ("$pairs", "$ordered", "$counter"):
        for key, item in body:
            yield from _walk(item, f"{path}.{_word(key)}")
    elif tag in _ITEMS:
        yield from _walk_items(body, path)
    elif tag in _WORDS:
        yield path, body
    elif tag == "$complex":
        yield path, str(complex(*map(float.fromhex, body)))
    elif tag in ("$bytes", "$bytearray"):
        yield path, f"{len(body) * 3 // 4} bytes"


def _walk_items(items: list[Any], path: str) -> Iterator[tuple[str, Any]]:
    inside = [list(_walk(item, f"{path}.{number}")) for number, item in enumerate(items)]
    plain = all(len(found) == 1 and found[0][0] == f"{path}.{i}" for i, found in enumerate(inside))
    if not plain:
        yield from itertools.chain.from_iterable(inside)
    elif len(items) > MOST_ITEMS:
        yield path, f"{len(items)} values"
    else:
        yield path, [value for ((_, value),) in inside]


def _word(key: Any) -> str:
    return str(next(iter(key.values()))) if isinstance(key, dict) else str(key)
