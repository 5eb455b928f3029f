"""Training data that the script replaces while it trains, and that a resume begins with as at the first start."""

from __future__ import annotations

import dis
import functools
import hashlib
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import Dataset

from holdfast.inventory.attribute_walk import (
    LIBRARIES,
    MOST_ENTRIES,
    NUMBERS,
    children,
    describer_of,
    is_ignored,
    settled,
)
from holdfast.state.references import CONTAINERS, attributes, container_type, length
from holdfast.torch_internals import version_of

DEPTH = 4
MOST_PARTS = 200
MOST_COMPARED = 8
"""Of more loaders, the data of the last ones is compared."""
COMPARED_ITERATIONS = 2
"""Loaders of so many iterations after a resume are compared with those before the checkpoint."""
_READING = ("__getitem__", "__getitems__", "__iter__", "__call__", "__len__")
_OF_TORCH = frozenset({"dataset", "datasets", "indices", "tensors"})


class TrainingData:
    """Compares the data and the loaders of iterations after a resume with those before the checkpoint.

    Loaders are known by a key: the number in which the script gave them to `session.batches`, or among those that
    it gave to the session.
    """

    def __init__(self) -> None:
        self._last: list[str] = []
        """Loaders of the last iteration that drew batches."""
        self._iteration = 0
        self._uses: dict[str, list[int]] = {}
        """The first and the last iteration that drew from a loader."""
        self._first: dict[str, str] = {}
        """Digests of the data with which the first start began."""
        self._matching: dict[str, str] = {}
        """Digests of the checkpoint, by which loaders are matched."""
        self._digests: dict[str, str] = {}
        """Digests of the data at the last checkpoint, also of loaders that were not used since the resume."""
        self._known: dict[str, tuple[Any, str | None]] = {}
        """Marks and digests of the data, by key."""
        self._saved: Mapping[str, Any] = {}
        """State of the checkpoint, until it was compared."""
        self._used: list[list[str]] = []
        """Loaders of the iterations since the resume."""

    def state_dict(self, loaders: Mapping[str, Any], is_within_epoch: Callable[[str], bool]) -> dict[str, Any]:
        for key in list(loaders)[-MOST_COMPARED:]:
            if (digest := self._digest(key, loaders[key])) is not None:
                self._digests[key] = digest
        return {
            "digests": dict(self._digests),
            "first": dict(self._first),
            "uses": {key: list(each) for key, each in self._uses.items()},
            "last": self._last if all(map(is_within_epoch, self._last)) else [],
            "iteration": self._iteration,
        }

    def restored(self, saved: Mapping[str, Any]) -> None:
        """Compare the next iterations with a checkpoint."""
        self._saved, self._used, self._matching = saved, [], dict(saved.get("digests", {}))
        self._first, self._uses = dict(saved.get("first", {})), dict(saved.get("uses", {}))
        self._iteration, self._last, self._digests = saved.get("iteration", 0), [], dict(saved.get("digests", {}))

    def number_of(self, number: int, count: int, loader: Any) -> int:
        """Return the number that the checkpoint has for a loader that the script uses as one with this number."""
        digests = self._matching
        own = self._digest(batches_key(number), loader)
        numbers = [
            each for each in range(number, count) if own is not None and digests.get(batches_key(each)) == own
        ]
        return number if number in numbers or len(numbers) != 1 else numbers[0]

    def exchanged(self, one: int, other: int) -> None:
        """Exchange what the checkpoint has of two loaders of `session.batches`."""
        keys = {batches_key(one): batches_key(other), batches_key(other): batches_key(one)}
        tables: list[dict[str, Any]] = [self._matching, self._digests, self._first, self._uses]
        for values in tables:
            exchanged = {keys.get(key, key): value for key, value in values.items()}
            values.clear()
            values.update(exchanged)
        if self._saved:
            last = [keys.get(key, key) for key in self._saved.get("last", [])]
            self._saved = {"digests": dict(self._matching), "first": dict(self._first), "last": last}
            self._saved |= {"uses": dict(self._uses)}

    def iteration_ended(self, used: list[str], loaders: Callable[[], Mapping[str, Any]]) -> list[str]:
        """Describe, once, data that the script had replaced before the checkpoint and not after the resume."""
        self._iteration += 1
        self._last = used or self._last
        for key in used:
            if key not in self._uses and (digest := self._digest(key, loaders().get(key))) is not None:
                self._first.setdefault(key, digest)
            self._uses[key] = [self._uses.get(key, [self._iteration])[0], self._iteration]
        if not self._saved:
            return []
        self._used.append(used)
        if len(self._used) < COMPARED_ITERATIONS:
            return []
        saved, drawn, self._saved, self._used = self._saved, self._used, {}, []
        after, before, uses = {key for each in drawn for key in each}, saved.get("last", []), saved.get("uses", {})
        is_known = before and all(drawn) and all(key in uses for key in (*after, *before))
        is_first = is_known and not after & set(before)
        if is_first and all(uses[old][1] <= uses[new][0] for old in after for new in before):
            now = f"from {_names(after, loaders())}"
            return [_message(now, f"from {', '.join(before)}, which the script had put in its place")]
        digests, first = saved.get("digests", {}), saved.get("first", {})
        for key in sorted(after):
            was, start = digests.get(key), first.get(key)
            if None not in (was, start) and was != start == self._digest(key, loaders().get(key)):
                name = _names({key}, loaders())
                return [_message(f"the first data of {name} again", "data that the script had put in its place")]
        return []

    def _digest(self, key: str, loader: Any) -> str | None:
        try:
            marks = [mark for _, _, mark in _parts(loader)]
            known = self._known.get(key)
            if known is None or known[0] != marks:
                text = repr([(path, described) for path, described, _ in _parts(loader)])
                digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest() if marks else None
                self._known[key] = known = marks, digest
            return known[1]
        except Exception:  # objects of the script may behave in any way
            return None


def batches_key(number: int) -> str:
    return f"loader {number + 1}"


def given_key(number: int) -> str:
    return f"given loader {number + 1}"


def _names(keys: set[str], loaders: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{key} over {type(attributes(loaders.get(key)).get('dataset')).__name__}" for key in sorted(keys)
    )


def _message(now: str, before: str) -> str:
    return (
        f"after the resume, the script draws {now}; before the checkpoint it drew {before}. A script that "
        "replaces its training data while it trains must do so again when it resumes: choose the data by "
        "session.iteration, or by a stage in holdfast.Variables, after session.resume() and before the first batch"
    )


def _parts(loader: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield paths and descriptions of the data of a loader, and marks that change with it and cost less."""
    left, seen, count = [("", attributes(loader).get("dataset"), 0)], set(), 0
    while left and count < MOST_PARTS:
        path, item, level = left.pop(0)
        if item is None or id(item) in seen or hasattr(type(item), "state_dict"):
            continue
        seen.add(id(item))
        if level == 0 and (isinstance(item, (torch.Tensor, *CONTAINERS)) or hasattr(type(item), "dtype")):
            yield path, _described(item), _mark(item)
            return
        for name, value in tuple(attributes(item).items()):
            if not _is_data(type(item), name, value):
                continue
            count += 1
            yield f"{path}.{name}", _described(value), _mark(value)
            if level < DEPTH:
                inner = value if isinstance(value, (list, tuple)) and len(value) <= MOST_ENTRIES else (value,)
                left += [
                    (f"{path}.{name}[{n}]", each, level + 1) for n, each in enumerate(inner) if _is_dataset(each)
                ]


def _is_dataset(value: Any) -> bool:
    return isinstance(value, Dataset)


def _is_data(kind: type, name: str, value: Any) -> bool:
    if _package(kind) in LIBRARIES:
        return name in _OF_TORCH
    if name in _stored_by_reading(kind) or name not in _read_by_reading(kind):
        return False
    is_value = type(value) is str or isinstance(value, (torch.Tensor, list, tuple, Dataset))
    return (is_value or hasattr(type(value), "dtype")) and (_is_dataset(value) or not is_ignored(name))


def _package(kind: type) -> str:
    return str(kind.__module__).partition(".")[0]


def _described(value: Any) -> Any:
    if _is_dataset(value):
        return type(value).__qualname__
    if (describe := describer_of(type(value))) is not None:
        return settled(describe(value))
    if isinstance(value, CONTAINERS):
        entries = tuple(_described(each) for _, each in children(value))
        return container_type(value).__name__, length(value), entries
    return type(value).__qualname__


def _mark(value: Any) -> Any:
    if type(value) in NUMBERS:
        return value
    if isinstance(value, torch.Tensor):
        return id(value), version_of(value)
    ends = [id(each) for _, each in children(value)] if isinstance(value, (list, tuple)) else []
    return id(value), len(ends), tuple(ends)


@functools.lru_cache(1024)
def _codes_of_reading(kind: type) -> tuple[types.CodeType, ...]:
    """Return the code of the methods with which a dataset gives samples, and of those that they call."""
    found: dict[str, types.CodeType] = {}
    left = list(_READING)
    while left:
        name = left.pop()
        member = next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)
        member = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        code = getattr(member, "__code__", None)
        if isinstance(code, types.CodeType) and name not in found:
            found[name] = code
            left += code.co_names
    return tuple(found.values())


@functools.lru_cache(1024)
def _read_by_reading(kind: type) -> frozenset[str]:
    return frozenset(name for code in _codes_of_reading(kind) for name in code.co_names)


@functools.lru_cache(1024)
def _stored_by_reading(kind: type) -> frozenset[str]:
    codes = _codes_of_reading(kind)
    return frozenset(
        each.argval for code in codes for each in dis.get_instructions(code) if each.opname == "STORE_ATTR"
    )
