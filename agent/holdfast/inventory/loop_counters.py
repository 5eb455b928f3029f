"""Counters of the script's loop that do not go back with the state, such as those of `enumerate`.

Each checkpoint holds their values. After a resume they are compared, and one on which training depends is named.
"""

from __future__ import annotations

import argparse
import ast
import functools
import types
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from holdfast.inventory.script_code import (
    Dependents,
    Loop,
    ScriptFrame,
    calls_in,
    function_of,
    loops_around,
    resolve,
    root_of,
    script_frames,
    source_line,
    whole_number,
    within,
)

MOST_COUNTERS = 32
_COUNTING = ("enumerate", "range", "trange", "count")


class Counter(NamedTuple):
    """A variable that a loop counts."""

    target: ast.AST
    text: str
    limit: ast.Call | None
    """The call of `range` that ends the loop by it."""
    begins_again: bool
    """Whether it begins again within the job, as in each epoch."""


class Reading(NamedTuple):
    """A counter at one instant."""

    counter: Counter
    frame: ScriptFrame
    value: int
    limit: tuple[int, ...] | None
    """The arguments of `range`; `None` if they are not known."""


class LoopCounters:
    """Compares the counters of the loop with those of the checkpoint. For the training thread."""

    def __init__(self) -> None:
        self._saved: Mapping[str, Any] = {}
        """Values and limits of the checkpoint, until they were compared."""
        self._first: dict[str, int] | None = None
        """Values at the end of the first iteration after it."""
        self._is_in_place = False
        self._reported: set[str] = set()

    def state_dict(self) -> dict[str, list[int]]:
        """Return the values of the counters, each followed by the limits of its loop. Called within `step`."""
        return {key: [each.value, *(each.limit or ())] for key, each in _readings().items()}

    def restored(self, saved: Mapping[str, Any], *, is_in_place: bool) -> None:
        """Compare the next iterations with a checkpoint."""
        self._saved, self._first, self._is_in_place = saved, None, is_in_place

    @property
    def is_waiting(self) -> bool:
        """Whether the next iteration is compared."""
        return bool(self._saved)

    def iteration_ended(self, *, epoch_advanced: bool | None) -> list[str]:
        """Describe, once each, the counters on which training depends and that are others than without the resume.

        Args:
            epoch_advanced: whether an epoch has begun since the checkpoint; `None` if it is not known.
        """
        if not self._saved:
            return []
        now = _readings()
        if self._first is None:
            self._first = {key: each.value for key, each in now.items()}
            return []
        first, saved, self._first, self._saved = self._first, self._saved, None, {}
        found = []
        for key, reading in now.items():
            was, before = saved.get(key), first.get(key)
            if key in self._reported or before is None or not was or reading.value < before:
                continue
            if reading.counter.begins_again and epoch_advanced is not False:
                goes_on = epoch_advanced is None and reading.limit == tuple(was[1:])
                if not (goes_on and was[0] + 2 * (reading.value - before) in range(*reading.limit or (0,))):
                    continue
            is_same = before == was[0] and epoch_advanced  # it counts epochs
            if (before > was[0] or is_same) and not self._is_in_place:
                continue  # it goes on
            change = was[0] + reading.value - before - before
            is_other = change > 0 or (change and self._is_in_place and reading.value > before)
            if is_other and (what := self._named(reading, was, change)):
                self._reported.add(key)
                found.append(what)
        return found

    def _named(self, reading: Reading, was: list[int], change: int) -> str | None:
        counter, code = reading.counter, reading.frame.code
        function = function_of(code)
        assert function is not None

        def is_same(remainder: ast.BinOp) -> bool:
            divisor = resolve(remainder.right, reading.frame.values)
            left = remainder.left
            if isinstance(left, ast.BinOp) and isinstance(left.op, (ast.Add, ast.Sub)):
                left = left.left if isinstance(left.right, ast.Constant) else left.right
            return (
                type(divisor) is int
                and divisor != 0
                and ast.unparse(left) == counter.text
                and not change % divisor
            )

        def is_off(test: ast.AST) -> bool:
            if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
                return any(map(is_off, test.values))
            holder = resolve(test.value, reading.frame.values) if isinstance(test, ast.Attribute) else None
            value = resolve(test, reading.frame.values)
            return isinstance(holder, argparse.Namespace) and (value is False or value is None)

        found: ast.AST | None = None
        if counter.limit is not None and reading.limit == tuple(was[1:]) and not self._is_in_place:
            found = counter.limit
        found = found or Dependents(function, counter.text, is_same, is_off).first()
        if found is None:
            return None
        how = "goes on after the restore" if self._is_in_place else "counts from its start again after the resume"
        return (
            f"the counter `{counter.text}` of the loop {how}: it was {was[0]:,} at the checkpoint, and "
            f"{reading.value:,} two iterations after it. What the script does depends on it "
            f"({source_line(code, found)}): it is done at other iterations than without the interruption. "
            "Count in holdfast.Variables, or by session.iteration"
        )


def _readings() -> dict[str, Reading]:
    """Read the counters of the loops around the current call, by function and text."""
    frames = script_frames(_names)
    found: dict[str, Reading] = {}
    for place, frame in enumerate(frames):
        is_repeated = any(_loops(each.code, each.line) for each in frames[place + 1 :])
        for counter in _counters(frame.code, frame.line):
            value = resolve(counter.target, frame.values)
            if type(value) is int and len(found) < MOST_COUNTERS:
                is_local = isinstance(counter.target, ast.Name) and frame.code.co_name != "<module>"
                begins_again = counter.begins_again or (is_repeated and is_local)
                counter = counter._replace(begins_again=begins_again)
                reading = Reading(counter, frame, value, _limit(counter, frame))
                found.setdefault(f"{frame.code.co_name}: {counter.text}", reading)
    return found


def _limit(counter: Counter, frame: ScriptFrame) -> tuple[int, ...] | None:
    values = [whole_number(each, frame.values) for each in counter.limit.args] if counter.limit is not None else []
    known = tuple(each for each in values if each is not None)
    return known if values and len(known) == len(values) else None


@functools.lru_cache(64)
def _names(code: types.CodeType) -> frozenset[str]:
    """Return the names of the variables that counters and their divisors and limits are read from."""
    function = function_of(code)
    if function is None:
        return frozenset()
    found: list[ast.AST] = []
    for each in within(function):
        if isinstance(each, ast.AugAssign):
            found.append(each.target)
        elif isinstance(each, ast.For):
            found += [each.target, *(argument for call in calls_in(each.iter) for argument in call.args)]
        elif isinstance(each, ast.BinOp) and isinstance(each.op, ast.Mod):
            found.append(each.right)
        elif isinstance(each, ast.Assign):
            found += each.targets
        elif isinstance(each, ast.If):
            parts_of_test = each.test, *getattr(each.test, "values", ())
            found += [part for part in parts_of_test if isinstance(part, ast.Attribute)]
    parts = (part for each in found for part in (each, *within(each)))
    return frozenset(name for part in parts if (name := root_of(part)) is not None)


@functools.lru_cache(64)
def _loops(code: types.CodeType, line: int) -> tuple[Loop, ...]:
    function = function_of(code)
    return tuple(loops_around(function, line)) if function is not None else ()


@functools.lru_cache(64)
def _counters(code: types.CodeType, line: int) -> tuple[Counter, ...]:
    loops = _loops(code, line)
    found: dict[str, Counter] = {}
    for depth, loop in enumerate(loops):
        if isinstance(loop, ast.For):
            for name, limit in _counted(loop.target, loop.iter):
                found.setdefault(name.id, Counter(name, name.id, limit, depth > 0))
    assigned = [text for loop in loops for text in _assigned(loop)]
    for loop in loops:
        for target in _increased(loop):
            text = ast.unparse(target)
            found.setdefault(text, Counter(target, text, None, text in assigned))
    return tuple(found.values())


def _counted(target: ast.AST, iterated: ast.AST) -> Iterator[tuple[ast.Name, ast.Call | None]]:
    """Yield the counters of a `for` over `enumerate`, `range` or `count`, also within `tqdm`, with the `range`."""
    call = iterated
    while isinstance(call, ast.Call):
        name = getattr(call.func, "attr", None) or getattr(call.func, "id", "")
        inner = call.args[0] if call.args else ast.Pass()
        if name == "enumerate" and isinstance(target, ast.Tuple):
            yield from _counted(target.elts[-1], inner)
            target = target.elts[0]
        if name in _COUNTING:
            if isinstance(target, ast.Name):
                yield target, call if name in ("range", "trange") else None
            return
        call = inner


def _increased(loop: ast.AST) -> Iterator[ast.AST]:
    """Yield the variables that a loop adds to."""
    for each in within(loop):
        match each:
            case ast.AugAssign(target=target, op=ast.Add()):
                yield target
            case ast.Assign(targets=[target], value=ast.BinOp(left=left, op=ast.Add())):
                if ast.unparse(target) == ast.unparse(left):
                    yield target


def _assigned(loop: ast.AST) -> Iterator[str]:
    """Yield the variables that a loop assigns anew."""
    for each in within(loop):
        match each:
            case ast.Assign(targets=targets, value=value):
                texts = [ast.unparse(target) for target in targets]
                if not (isinstance(value, ast.BinOp) and ast.unparse(value.left) in texts):
                    yield from texts
