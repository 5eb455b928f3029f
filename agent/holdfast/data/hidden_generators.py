"""Generators that the first search of a loader does not see: in a cache, created later, or `itertools.cycle`."""

from __future__ import annotations

import gc
import itertools
import operator
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import IterableDataset

from holdfast.data.reachable import is_global_generator, reachable
from holdfast.state.rng import StatefulGenerator, is_generator

MOST_OBJECTS = 256
"""In a larger dataset they are not looked for: a search takes less than a millisecond."""
MOST_CACHED = 64
"""A cache of more values holds data."""
_REPEATABLE = ("list_iterator", "tuple_iterator", "range_iterator")
_ELEMENT = "_lru_list_elem"
_PLAIN = (str, bytes, int, float, bool, type(None))


class CyclePlace(StatefulGenerator):
    """Gives an `itertools.cycle` over a list, tuple or range `state_dict` and `load_state_dict`: its place."""

    def __init__(self, cycle: Any) -> None:
        self.generator = cycle
        place = self._place()
        self.is_known = place is not None
        self.kind = f"itertools.cycle over {place[1]} items" if place is not None else None

    def _place(self) -> tuple[int, int] | None:
        """Return the number of the next item, and how many there are; `None` if that is unknown."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                _, (source,), (given, is_repeating) = self.generator.__reduce__()
        except (TypeError, ValueError, AttributeError):  # another version of Python
            return None
        left = operator.length_hint(source) if type(source).__name__ in _REPEATABLE else 0
        count = len(given) + (0 if is_repeating else left)
        return ((count - left) % count, count) if left else None if not given or is_repeating else (0, count)

    def state_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "state": (self._place() or (0, 0))[0]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if (now := self._place()) is not None:
            for _ in range((state_dict["state"] - now[0]) % now[1]):
                next(self.generator)


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
