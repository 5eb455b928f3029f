"""Generators that the first search of a loader does not see: in a cache, or created later."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import IterableDataset

from holdfast.data.reachable import is_global_generator, reachable
from holdfast.state.rng import StatefulGenerator, is_generator

MOST_OBJECTS = 256
"""In a larger dataset they are not looked for: a search takes less than a millisecond."""
MOST_CACHED = 64
"""A cache of more values holds data."""
_ELEMENT = "_lru_list_elem"
_PLAIN = (str, bytes, int, float, bool, type(None))


def cached_values(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield the generators that a function of `functools.lru_cache` keeps, by the arguments of the calls."""
    if function.cache_info().currsize > MOST_CACHED:
        return
    held = gc.get_referents(function)
    # with a limit, the type of a list's elements follows each key and value
    triples = zip(held, held[1:], held[2:], strict=False)
    pairs = [(key, value) for key, value, kind in triples if type(kind) is type and kind.__name__ == _ELEMENT]
    pairs += [pair for each in held if type(each) is dict for pair in tuple(each.items())]
    for key, value in pairs:
        if is_generator(value) and all(type(each) in _PLAIN for each in (key if type(key) is tuple else (key,))):
            yield f".cached[{key!r}]", value


def look_again(
    parts: Mapping[str, Any], known: dict[str, Any], candidates: Mapping[str, StatefulGenerator]
) -> dict[str, StatefulGenerator]:
    """Add generators that were created since the first search to `known`, if they were candidates; return others.

    One that is created anew for each sample or epoch is never the same object twice.
    """
    items = {id(each.generator) for each in known.values() if isinstance(each, StatefulGenerator)}
    found: dict[str, StatefulGenerator] = {}
    for name in ("dataset", "collate_fn"):
        part = parts.get(name)
        if isinstance(part, IterableDataset) or hasattr(part, "set_epoch"):
            continue  # it may make a new generator in each epoch
        reached = list(itertools.islice(reachable(name, part), MOST_OBJECTS + 1))
        for path, item in reached if len(reached) <= MOST_OBJECTS else ():
            if is_generator(item) and not is_global_generator(item) and id(item) not in items:
                found[path] = StatefulGenerator(item)
    for path, each in tuple(found.items()):
        if path in candidates and candidates[path].generator is each.generator:
            known[path] = found.pop(path)
    return found
