"""What hangs on a loader: random generators, iterators, and datasets whose state is known to be incomplete.

Depth and number of objects are bounded.
"""

from __future__ import annotations

import functools
import gc
import itertools
import random
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from holdfast.state.references import CONTAINERS, attributes, entries, entry_name, length, slots, walk
from holdfast.state.rng import is_generator
from holdfast.torch_internals import kept_iterator

DEPTH = 8
"""How many attributes, closures, lists and dictionaries deep the search goes."""
MOST_ENTRIES = 256
"""A list or dictionary of more entries holds data."""
MOST_OBJECTS = 4096
_FUNCTIONS = (types.FunctionType, type(functools.lru_cache(lambda: None)))
_LIBRARIES = frozenset({"builtins", "torch", "numpy", "collections", "functools", "typing", "abc"})
"""Packages whose classes are not searched for functions that use a global generator."""

INCOMPLETE = {("datasets", "BufferShuffledExamplesIterable"): "its shuffle buffer"}
"""Classes by package and name whose `state_dict` lacks something, and what it lacks.

Hugging Face `datasets` says so in the documentation of `IterableDataset.state_dict`."""


def reachable(path: str, item: Any, without: object = None) -> Iterator[tuple[str, Any]]:
    """Yield what an object refers to, itself included, with its path; each object once, and never `without`."""
    return walk(path, item, lambda each: list(_parts(each)), DEPTH, most=MOST_OBJECTS, without=without)


def shared_iterator(item: Any) -> str | None:
    """Describe the iterator that an iterable is, or keeps: all of its iterators then share one position.

    `None` for an iterable that begins anew. A map-style dataset is not searched: it is read by index.
    """
    if hasattr(type(item), "__next__"):
        return f"a {type(item).__name__}, which can be iterated once"
    dataset = getattr(item, "dataset", None)
    by_index = None if isinstance(dataset, torch.utils.data.IterableDataset) else dataset
    for name, part in parts_in_process(item).items():
        for path, found in reachable(name, part, without=by_index) if part is not by_index else ():
            if hasattr(type(found), "__next__"):
                return f"a {type(item).__name__}, which keeps an iterator ({path})"
    return None


def parts_in_process(loader: Any) -> dict[str, Any]:
    """Return the attributes of a loader by name, except those that only its workers use."""
    if not isinstance(loader, torch.utils.data.DataLoader):
        return {"loader": loader}
    unused = {"_iterator", *(("dataset", "collate_fn", "worker_init_fn") if loader.num_workers else ())}
    return {name: value for name, value in vars(loader).items() if name not in unused}


def given_within(iterable: Any, objects: Mapping[str, Any]) -> list[str]:
    """Return the keywords of loaders with a position of their own from which a counted iterable draws."""
    loaders = {keyword: item for keyword, item in objects.items() if has_position(item) and item is not iterable}
    return [keyword for keyword, item in loaders.items() if is_within(item, iterable)]


def lacking_states(objects: Mapping[str, Any]) -> list[str]:
    """Describe the loaders among objects whose `state_dict` is known to be incomplete."""
    return [
        f"the state_dict of {keyword} lacks {what}: each resume loses the samples in it. Draw from "
        f"session.batches(...) instead of giving {keyword} by keyword, or use holdfast.DataLoader"
        for keyword, item in objects.items()
        if has_position(item) and (what := incomplete_state(item)) is not None
    ]


def has_position(item: Any) -> bool:
    """Whether an object is a loader of another library that saves its position."""
    is_own = type(item).__module__.startswith("holdfast.") or isinstance(item, torch.nn.Module)
    return hasattr(type(item), "__iter__") and hasattr(item, "state_dict") and not is_own


def is_within(loader: Any, iterable: Any) -> bool:
    """Whether an iterable draws from a loader, as far as its attributes, closures and iterators show it."""
    own = [loader, kept_iterator(loader)]
    return any(part is not None and any(part is each for each in own) for _, part in reachable("", iterable))


def incomplete_state(item: Any) -> str | None:
    """Describe what the `state_dict` of a dataset is known to lack; `None` if nothing is known."""
    parts = (part for root in (item, getattr(item, "dataset", None)) for _, part in reachable("", root))
    for part in parts:
        for kind in type(part).__mro__:
            if (what := INCOMPLETE.get((kind.__module__.partition(".")[0], kind.__name__))) is not None:
                return what
    return None


def _parts(item: Any) -> Iterator[tuple[str, Any]]:
    if (module := type(item).__module__).startswith("holdfast.data."):
        return  # what is of holdfast.data has a position of its own, which includes its generators
    if isinstance(item, types.MethodType):
        yield from ((".__self__", item.__self__), (".__func__", item.__func__))
    elif isinstance(item, types.FunctionType):
        yield from _of_function(item)
    elif isinstance(item, _FUNCTIONS):
        from holdfast.data.hidden_generators import cached_values  # few loaders have a cache

        yield from cached_values(item)
    elif isinstance(item, types.GeneratorType):
        frame = item.gi_frame
        yield from ((f".{name}", value) for name, value in (frame.f_locals.items() if frame else ()))
    elif isinstance(item, CONTAINERS) and length(item) <= MOST_ENTRIES:
        yield from ((entry_name(key), value) for key, value in tuple(entries(item)))
    elif module in ("builtins", "itertools") and hasattr(type(item), "__next__"):
        # zip, map, enumerate, cycle and others have no attributes
        yield from ((f"[{number}]", value) for number, value in enumerate(gc.get_referents(item)))
    if isinstance(item, torch.utils.data.DataLoader):
        yield from ((f".{name}", value) for name, value in parts_in_process(item).items())
    elif module != "builtins" and not is_generator(item):
        yield from _of_object(item)


def _of_object(item: Any) -> Iterator[tuple[str, Any]]:
    yield from ((f".{name}", value) for name, value in (*attributes(item).items(), *slots(item)))
    for kind in type(item).__mro__:
        if kind.__module__.partition(".")[0] not in _LIBRARIES:
            for name, value in tuple(vars(kind).items()):
                if isinstance(value, (types.FunctionType, staticmethod, classmethod)) or is_generator(value):
                    yield f".{name}", getattr(value, "__func__", value)


def _of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield f".{name}", cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    yield from ((".__defaults__", function.__defaults__), (".__kwdefaults__", function.__kwdefaults__))
    for name in _names_in(code):
        value = function.__globals__.get(name)
        is_helper = isinstance(value, _FUNCTIONS) and value.__module__ == function.__module__
        if is_helper or is_generator(value):
            yield f".{name}", value


def _names_in(code: types.CodeType) -> dict[str, None]:
    """Return the names of globals that code uses, also within lambdas and comprehensions."""
    nested = [_names_in(each) for each in code.co_consts if isinstance(each, types.CodeType)]
    return dict.fromkeys(itertools.chain(code.co_names, *nested))


def is_global_generator(generator: object) -> bool:
    """Whether a generator is one of the process, which a session saves itself."""
    numpy = sys.modules.get("numpy")
    own = [torch.default_generator, getattr(random.random, "__self__", None)]
    if numpy is not None and "numpy.random" in sys.modules:
        own.append(getattr(numpy.random.rand, "__self__", None))
    return any(generator is each for each in own)
