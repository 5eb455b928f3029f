"""State of the given objects that training changes and that no checkpoint holds: plain attributes and generators.

They are captured when training begins, after the first iterations, and rarely after that: on the training thread,
in slices of less than a millisecond. They are compared in the background.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch

from holdfast.inventory.attribute_walk import (
    CONTAINER_DEPTH,
    NUMBERS,
    OF_LOADERS,
    Attribute,
    AttributeWalk,
    children,
    current_value,
    describer_of,
    is_walked,
    parts_of_loaders,
    read_by,
    settled,
    words_of,
)
from holdfast.inventory.missing_state import generators_referred_to
from holdfast.state.capture import PLAIN, watch_of
from holdfast.state.references import attributes
from holdfast.state.registry import CapturedState, Registry
from holdfast.state.variables import Variables
from holdfast.system import io_pool

logger = logging.getLogger("holdfast")

START_SECONDS = 0.1
"""Longest capture when training begins."""
SLICE_SECONDS = 0.0006
"""Longest part of a later capture between two iterations."""
SECOND_ITERATION = 3
"""The first comparison begins after the first iteration, and the second after this one."""
FACTOR = 4
"""Ratio of the iterations of later comparisons."""
MOST_NAMED = 5
"""Most attributes that one report names."""
MOST_REPORTS = 5
RECOMPUTED = (
    "mask",
    "grid",
    "anchor",
    "pos",
    "freq",
    "cos",
    "sin",
    "rope",
    "rotary",
    "window",
    "kernel",
    "index",
    "idx",
)
"""Parts of names of tensors that are computed once, from shapes alone."""


_FILLERS = frozenset({"", "is", "has", "was", "current", "cur", "num", "n"})


class Change(NamedTuple):
    path: str
    attribute: Attribute
    values: str
    """The values before and after, if they are short."""


class ChangingState:
    """Compares the attributes of the given objects between iterations. For the training thread."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._walk: AttributeWalk | None = None
        """The capture under way."""
        self._comparing: Future[list[Change]] | None = None
        self._first: dict[str, Attribute] | None = None
        self._last: dict[str, Attribute] = {}
        self._comparisons = 0
        self._next = 1
        """Iteration of this attempt after which the next capture begins."""
        self._unchecked: dict[str, Change] = {}
        """Changes by path, until a checkpoint shows whether it holds them."""
        self._messages: list[str] = []
        self._reported: set[tuple[str, str]] = set()
        """Types and attributes that were found to change."""
        self._reports = 0
        self.wakes_at = 0
        """Iteration from which `found` is to be called; 0 while it has something to do or to say."""
        self._generators: set[int] = set()
        """Identities of the generators that are reported when training begins."""

    def begin(self) -> None:
        """Begin the first capture, when training begins."""
        try:
            given = self._registry.given
            self._generators = {id(each) for each in generators_referred_to(given)}  # which are reported as such
            self._first, self._walk = None, self._new_walk()
            self._advance(START_SECONDS)
        except Exception as error:  # objects of the script may behave in any way
            self._give_up(error)

    def found(self, iteration: int, loaders: Callable[[], Collection[Any]]) -> list[str]:
        """Go on with a comparison after an iteration of this attempt; describe, once, what a comparison found.

        `loaders` returns those whose positions are saved, and whose datasets are compared as well.
        """
        try:
            if self._comparing is not None:
                if self._comparing.done():
                    self._unchecked |= {change.path: change for change in self._comparing.result()}
                    self._comparing = None
                    if self._unchecked and not self._may_be_held():
                        self._check(self._states_of_variables(), set())
            elif self._walk is not None:
                self._advance(SLICE_SECONDS)
            elif iteration >= self._next and self._first is not None:
                self._next = SECOND_ITERATION if iteration < SECOND_ITERATION else iteration * FACTOR
                self._walk = self._new_walk(loaders())
                self._advance(SLICE_SECONDS)
        except Exception as error:  # objects of the script may behave in any way
            self._give_up(error)
        messages, self._messages = self._messages, []
        self.wakes_at = 0 if self._walk or self._comparing else self._next
        return messages

    def captured(self, state: CapturedState) -> None:
        """Report the changes that a checkpoint does not hold."""
        if not self._unchecked:
            return
        try:
            held = {each.untyped_storage().data_ptr() for each in state.whole.values() if type(each) in PLAIN}
            self._check(state.states, held)
        except Exception as error:  # objects of the script may behave in any way
            self._give_up(error)

    def _check(self, states: Mapping[str, Any], storages: set[int]) -> None:
        changes, self._unchecked = list(self._unchecked.values()), {}
        adapters = [k for k, item in self._registry.objects.items() if _is_adapter(item)]
        entries = [
            (path, each)
            for path, each in _entries("", states, 8)
            # an adapter saves what the library has, and what callbacks and hooks of the script return
            if path.split(".")[1:2] != adapters[:1] or ".callbacks." in path or ".hooks." in path
        ]
        changes = [each for each in changes if not _is_held(each, entries, storages)]
        if changes := [each for each in changes if not _is_filled_by_step(each.attribute)]:
            self._messages.append(_message(changes))
            self.wakes_at = 0
            self._reported |= {_kind(each.attribute) for each in changes}
            self._reports += 1
            if self._reports == MOST_REPORTS:
                self._give_up(None)

    def _may_be_held(self) -> bool:
        """Whether a given object may save plain values by a `state_dict()` of its own."""
        objects = self._registry.objects
        return any(
            watch_of(objects[keyword]) is None for keyword in {root.partition(".")[0] for root in self._roots()}
        )

    def _states_of_variables(self) -> dict[str, Any]:
        objects = self._registry.objects.items()
        return {keyword: item.state_dict() for keyword, item in objects if isinstance(item, Variables)}

    # Captures

    def _new_walk(self, loaders: Collection[Any] = ()) -> AttributeWalk:
        given = self._registry.given
        known = {id(each) for each in (*given.values(), *self._registry.objects.values())}
        return AttributeWalk(self._roots() | parts_of_loaders(loaders), known | self._generators)

    def _roots(self) -> dict[str, Any]:
        """Return the objects to compare, by keyword; of an adapter, the trainer and its callbacks."""
        found: dict[str, Any] = {}
        for keyword, item in self._registry.objects.items():
            if _is_adapter(item):
                trainer = attributes(item).get("_trainer")
                parts = {
                    f"{keyword}.callbacks[{n}]": each
                    for n, each in enumerate(attributes(trainer).get("callbacks") or ())
                }
                found |= {
                    path: each for path, each in {keyword: trainer, **parts}.items() if is_walked(type(each))
                }
            elif isinstance(item, (torch.nn.Module, torch.optim.Optimizer)) or _saves_attributes_apart(item):
                found[keyword] = item
        return found

    def _saved_by_adapters(self) -> list[str]:
        """Return the paths of attributes of a trainer that its adapter saves."""
        objects = self._registry.objects.items()
        return [f"{keyword}.{name}" for keyword, item in objects for name in getattr(item, "saved_attributes", ())]

    def _advance(self, seconds: float) -> None:
        assert self._walk is not None
        ends_at = time.perf_counter() + seconds
        if not self._walk.advance(lambda: time.perf_counter() >= ends_at):
            return
        now, self._walk = self._walk.found, None
        for path in self._saved_by_adapters():
            now.pop(path, None)
        first, last, self._last = self._first, self._last, now
        if first is None:
            self._first = now
            return
        self._comparisons += 1
        number = self._comparisons
        self._comparing = io_pool.submit(lambda: self._changes(first, last, now, number))

    def _give_up(self, error: Exception | None) -> None:
        if error is not None:
            logger.debug("attributes are not compared: %s: %s", type(error).__name__, error)
        self._walk = self._comparing = None
        self._unchecked, self._last, self._next = {}, {}, sys.maxsize

    # On another thread

    def _changes(
        self, first: dict[str, Attribute], last: dict[str, Attribute], now: dict[str, Attribute], number: int
    ) -> list[Change]:
        found = []
        for captured in (first, last, now) if number == 1 else (now,):
            for attribute in captured.values():
                attribute.parts.update({path: settled(part) for path, part in attribute.parts.items()})
        for path, attribute in now.items():
            before, start = last.get(path), first.get(path)
            if before is None or _kind(attribute) in self._reported:
                continue
            if path.startswith(OF_LOADERS) and not _is_used_setting(attribute):
                continue
            was, parts = before.parts, attribute.parts
            if number == 2 and was == parts and start is not None and _is_from_data(start.parts, parts, path):
                was = start.parts
            elif was == parts or not _matters(was.get(""), parts.get(""), number):
                continue
            found.append(Change(path, attribute, _values(was.get(""), parts.get(""))))
        return found


def _is_used_setting(attribute: Attribute) -> bool:
    """Whether an attribute of a dataset or collate function is a number that its code reads to give samples."""
    kind: Any = type(attribute.holder())
    value = attribute.parts.get("")
    is_number = value is not None and value[0] in ("bool", "int", "float")
    is_set = attribute.name == "epoch" and hasattr(kind, "set_epoch")
    return is_number and not is_set and attribute.name in read_by(kind)


def _kind(attribute: Attribute) -> tuple[str, str]:
    return attribute.type_name, attribute.name


def _is_adapter(item: Any) -> bool:
    return type(item).__module__.startswith("holdfast.integrations.")


def _saves_attributes_apart(item: Any) -> bool:
    """Whether an object has a `state_dict` of the script: that of a schedule of torch has all its attributes."""
    kind = type(item)
    is_loader = "__iter__" in dir(kind) and "dataset" in attributes(item)
    module = getattr(kind.__dict__.get("state_dict") or getattr(kind, "state_dict", None), "__module__", "") or ""
    return is_walked(kind) and not is_loader and not module.startswith("torch.")


def _matters(was: Any, now: Any, number: int) -> bool:
    """Whether a change since the comparison before, which is the start of training for the first, is one of state.

    What the first forward pass creates is often computed from shapes, so that a start creates it again.
    """
    if was is not None and now is not None and was[0] == now[0] == "bool":
        return True
    return number > 1 and not (was is None or now is None or "NoneType" in (was[0], now[0]))


def _is_from_data(start: dict[str, Any], parts: dict[str, Any], path: str) -> bool:
    """Whether the first iterations have created values of data, such as a scale or a list of inputs."""
    name = path.rpartition(".")[2].lower()
    if start.get("") != ("NoneType", None) or any(each in name for each in RECOMPUTED):
        return False
    return any(
        each[0] == "float" or (each[0] in ("tensor", "array") and ("float" in each[1] or within))
        for within, each in parts.items()
    )


def _values(was: Any, now: Any) -> str:
    kinds = [each.__name__ for each in NUMBERS]
    if was is None or now is None or was[0] not in kinds or now[0] not in kinds:
        return ""
    return f" ({str(was[1])[:30]!s} → {str(now[1])[:30]!s})"


def _message(changes: list[Change]) -> str:
    by_kind: dict[tuple[str, str], list[Change]] = {}
    for change in changes:
        by_kind.setdefault(_kind(change.attribute), []).append(change)
    named = [
        f"{first.path}{first.values}" + (f" and {len(rest)} more such attributes" if rest else "")
        for first, *rest in list(by_kind.values())[:MOST_NAMED]
    ]
    more = f" and {len(by_kind) - MOST_NAMED} other attributes" if len(by_kind) > MOST_NAMED else ""
    generators = any(each.attribute.parts.get("", ("",))[0] == "generator" for each in changes)
    hint = "Give a generator to the session, Session(generator=...). " if generators else ""
    return (
        f"training changes {', '.join(named)}{more}, which no checkpoint holds: a resume has the first value "
        f"again. {hint}Keep the value in a buffer, in get_extra_state(), in the state_dict() of the given object "
        "or in holdfast.Variables, unless each iteration computes it anew"
    )


def _entries(path: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    """Yield names and descriptions of the values of a state."""
    describe = describer_of(type(value))
    yield path, describe(value) if describe is not None else None
    if depth:
        for key, entry in children(value):
            yield from _entries(f"{path}.{key}", entry, depth - 1)


def _is_held(change: Change, entries: list[tuple[str, Any]], storages: set[int]) -> bool:
    """Whether a state has the value of an attribute: under a similar name, or one that cannot be a coincidence."""
    value, name = current_value(change.attribute), change.attribute.name
    leaves = list(_leaves(value, CONTAINER_DEPTH))
    if all(isinstance(each, torch.Tensor) and each.untyped_storage().data_ptr() in storages for each in leaves):
        return True
    describe = describer_of(type(value))
    described = describe(value) if describe is not None else None
    is_number = type(value) in NUMBERS
    may_coincide = value in (None, False, True, "") if is_number else False
    keyword = change.path.partition(".")[0]
    for path, entry in entries:
        is_equal = described is not None and entry == described
        if _is_similar(name, path) and (is_equal or not is_number):
            return True
        if is_equal and not may_coincide and (type(value) is not int or path.startswith(f".{keyword}.")):
            return True
    return leaves[0] is not value and _are_entries(
        leaves, [e for path, e in entries if path.startswith(f".{keyword}.")]
    )


def _are_entries(values: list[Any], entries: list[Any]) -> bool:
    """Whether a state has each of these values, as copies: the entries of a list or dict."""
    described = [describe(each) if (describe := describer_of(type(each))) else None for each in values]
    known = [_comparable(each) for each in entries]
    return all(each is not None and _comparable(each) in known for each in described)


def _comparable(description: Any) -> Any:
    """Leave the elements of a tensor on a device out: a comparison would wait for them."""
    on_device = type(description) is tuple and type(description[-1]) is list
    return description[:-1] if on_device else description


def _leaves(value: Any, depth: int) -> Iterator[Any]:
    """Yield what a list or dict consists of; the value itself if it is none, or empty."""
    within = [entry for _, entry in children(value)] if depth else []
    if not within:
        yield value
    for entry in within:
        yield from _leaves(entry, depth - 1)


def _is_filled_by_step(attribute: Attribute) -> bool:
    """Whether a scalar tensor of an optimizer has the value of one of its settings or counts, or follows from one.

    A step fills such tensors for a compiled function, which a number would compile anew.
    """
    optimizer, value = attribute.holder(), current_value(attribute)
    if not isinstance(optimizer, torch.optim.Optimizer) or not _is_scalar_tensor(value):
        return False
    groups, state = (list(_numbers_in("", vars(optimizer).get(part), 3)) for part in ("param_groups", "state"))
    if _is_among(attribute.name, value, groups + state):
        return True
    # a multiple of a setting: its name says which one, and others of the optimizer are filled
    is_named = any(name and words_of(name) <= words_of(attribute.name) for name, _ in groups)
    return is_named and any(
        _is_scalar_tensor(other) and _is_among(name, other, groups + state)
        for name, other in vars(optimizer).items()
    )


def _is_scalar_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.dim() and value.device.type == "cpu"


def _is_among(name: str, value: torch.Tensor, numbers: list[tuple[str, float]]) -> bool:
    """Whether a scalar tensor is one of some numbers; a whole number may be a coincidence, unless named alike."""
    scalar = value.item()
    tolerance = torch.finfo(value.dtype).eps if value.dtype.is_floating_point else 0.0
    return any(
        math.isclose(scalar, number, rel_tol=tolerance)
        and (scalar != round(scalar) or words_of(key) <= words_of(name))
        for key, number in numbers
    )


def _numbers_in(name: str, value: Any, depth: int) -> Iterator[tuple[str, float]]:
    if type(value) in (int, float):
        yield name, value
    elif depth:
        for key, entry in children(value):
            yield from _numbers_in(str(key), entry, depth - 1)


def _is_similar(name: str, path: str) -> bool:
    words, others = words_of(name) - _FILLERS, words_of(path.rpartition(".")[2]) - _FILLERS
    return "_extra_state" in path or (bool(words) and words == others)
