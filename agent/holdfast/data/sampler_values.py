"""What changes in a sampler: whole numbers that it counts, and weights, lists or numbers that training sets."""

from __future__ import annotations

import copy
import dis
import functools
import logging
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from holdfast.state.references import attributes, entries, length
from holdfast.torch_internals import version_of

logger = logging.getLogger("holdfast")

MOST_ENTRIES = 20_000_000
"""Longer lists and larger tensors of a sampler are not copied."""
_SCALARS = (int, float, bool, str, bytes, type(None))
_CONTAINERS = (list, tuple, dict, set)
_LEFT_OUT = frozenset({"data_source", "dataset"})


class SamplerValues:
    """The attributes of a sampler that change while it is used, such as `self.round += 1` in its `__iter__`.

    Values that do not change are settings of the script, which no checkpoint replaces.
    """

    kind = "counters"

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        # `set_epoch` sets the epoch: the session or the script calls it
        left_out = _LEFT_OUT | ({"epoch"} if hasattr(sampler, "set_epoch") else set())
        kind: Any = type(sampler)
        made = assigned_while_iterating(kind)
        found = [(name, value) for name, value in attributes(sampler).items() if name not in left_out]
        plain = {n: v for n, v in found if type(v) is int or (n not in made and _is_plain(v, 3))}
        self._first = copy.deepcopy(plain)
        self._first_objects = {name: (value, _version(value)) for name, value in plain.items()}
        self._loaded = self._first
        """Values before the sampler was read: the first ones, or those that were loaded last."""
        self._is_reported = False

    def state_dict(self) -> dict[str, Any]:
        now = attributes(self._sampler)
        changed = {
            name: now[name]
            for name in self._first
            if name in now and not self._is_first(name, now[name]) and _is_plain(now[name], 3)
        }
        self._report(changed)
        return {"kind": self.kind, "numbers": copy.deepcopy(changed)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set all values."""
        self._loaded = self._first | state["numbers"]
        for name in self._first:
            self._set(name, self._loaded[name])

    def go_on(self, state: Mapping[str, Any]) -> None:
        """Set the values that reading has not changed since `load_state_dict`: training changed them."""
        numbers, now = self._first | state["numbers"], attributes(self._sampler)
        for name in self._first:
            if _are_equal(now.get(name), self._loaded[name]):
                self._set(name, numbers[name])

    def _is_first(self, name: str, value: Any) -> bool:
        first, version = self._first_objects[name]
        if value is first and type(value) is torch.Tensor and version == _version(value):
            return True
        return _are_equal(value, self._first[name])

    def _set(self, name: str, value: Any) -> None:
        """Set an attribute, in place where the script may have another name for it."""
        now: Any = attributes(self._sampler).get(name)
        if _are_equal(now, value):
            return
        value = copy.deepcopy(value)
        is_alike = type(now) is type(value) and getattr(now, "shape", None) == getattr(value, "shape", None)
        is_alike = is_alike and getattr(now, "dtype", None) == getattr(value, "dtype", None)
        if is_alike and type(now) is torch.Tensor:
            now.copy_(value)
        elif is_alike and type(now) is list:
            now[:] = value
        elif is_alike and type(now) is dict:
            now.clear()
            now.update(value)
        elif is_alike and hasattr(now, "flags") and now.flags.writeable:
            now[...] = value
        else:
            vars(self._sampler)[name] = value

    def _report(self, changed: Mapping[str, Any]) -> None:
        """Name, once, what training changes and the sampler reads while it gives the indices of an epoch."""
        if self._is_reported or not changed:
            return
        kind: Any = type(self._sampler)
        if read := sorted(changed.keys() & read_while_iterating(kind)):
            self._is_reported = True
            logger.warning(
                "training changes %s of the sampler %s, whose __iter__ reads it while it gives indices: after a "
                "resume within an epoch, the rest of the epoch has another order. Read it once, at the start of "
                "__iter__",
                *(", ".join(read), kind.__name__),
            )


def order_drawn_anew(loader: Any) -> str | None:
    """Describe a sampler that another loader reads again from the global generator after a resume, if it does."""
    sampler = getattr(loader, "sampler", None)
    is_torchs = type(sampler).__module__.partition(".")[0] == "torch"
    if not is_torchs or getattr(sampler, "generator", loader) is not None:
        return None
    return (
        f"the {type(sampler).__name__} of {type(loader).__name__} draws from the global generator, whose numbers "
        "differ after a resume: give it generator=torch.Generator(), or use holdfast.DataLoader"
    )


@functools.cache
def read_while_iterating(kind: Any) -> frozenset[str]:
    """Return the attributes that a sampler's `__iter__` reads between two indices and does not set itself."""
    if (code := getattr(getattr(kind, "__iter__", None), "__code__", None)) is None:
        return frozenset()
    found = list(dis.get_instructions(code))
    yields = [each.offset for each in found if each.opname == "YIELD_VALUE"]
    loops = [(each.argval, each.offset) for each in found if each.opname.startswith("JUMP_BACKWARD")]
    loops = [(first, last) for first, last in loops if any(first <= place <= last for place in yields)]
    names = {
        each.argval
        for each in found
        if each.opname in ("LOAD_ATTR", "LOAD_METHOD")
        and any(first <= each.offset <= last for first, last in loops)
    }
    called = (getattr(getattr(kind, name, None), "__code__", None) for name in tuple(names))
    names.update(name for each in called if each is not None for name in each.co_names)
    return frozenset(names) - frozenset(assigned_while_iterating(kind))


@functools.cache
def assigned_while_iterating(kind: Any) -> frozenset[str]:
    """Return the attributes that a sampler's `__iter__` assigns, itself or by a method that it calls."""
    code = getattr(getattr(kind, "__iter__", None), "__code__", None)
    codes = [
        code,
        *(getattr(getattr(kind, name, None), "__code__", None) for name in getattr(code, "co_names", ())),
    ]
    return frozenset(name for each in codes if each is not None for name in _assigned(each))


def _assigned(code: types.CodeType) -> Iterator[str]:
    return (each.argval for each in dis.get_instructions(code) if each.opname == "STORE_ATTR")


def _version(value: Any) -> int | None:
    return version_of(value) if type(value) is torch.Tensor else None


def _is_plain(value: Any, depth: int) -> bool:
    kind = type(value)
    if kind in _SCALARS:
        return True
    if kind is torch.Tensor:
        return value.layout is torch.strided and not value.requires_grad and value.numel() <= MOST_ENTRIES
    if kind in _CONTAINERS and depth and length(value) <= MOST_ENTRIES:
        return all(_is_plain(each, depth - 1) for each in _parts(value))
    numpy = sys.modules.get("numpy")
    is_array = numpy is not None and kind is numpy.ndarray
    return is_array and value.dtype.kind in "biuf" and value.size <= MOST_ENTRIES


def _parts(value: Any) -> Iterator[Any]:
    for key, entry in entries(value):
        yield from (key, entry) if type(value) is dict else (entry,)


def _are_equal(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if hasattr(one, "dtype"):
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        return torch.equal(one, other.to(one.device)) if type(one) is torch.Tensor else bool((one == other).all())
    if type(one) in (list, tuple):
        try:
            return bool(one == other)
        except (RuntimeError, ValueError):  # tensors or arrays within
            return len(one) == len(other) and all(map(_are_equal, one, other))
    if type(one) is dict:
        return one.keys() == other.keys() and all(_are_equal(value, other[key]) for key, value in one.items())
    return bool(one == other)
