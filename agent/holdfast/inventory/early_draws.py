"""Random numbers that a script draws between the session and its loop: each start draws them again.

Before the resume they are the same ones if the script seeds its generators. After it they are not, and the first
iteration draws more numbers than the later ones.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import linecache
import os
import random
import sys
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from holdfast.accelerators import modules_in_use
from holdfast.inventory.script_code import (
    Loop,
    Scope,
    ScriptFrame,
    calls_in,
    function_of,
    is_module,
    is_reporting,
    loops_around,
    script_frames,
    within,
)

COMPARED_ITERATIONS = 4
"""The first iteration after a resume is compared with the others of so many, which must draw equally many."""
CELL = "cell"
PERIOD = 624
"""Numbers are counted modulo the length of the state of the Mersenne Twister."""
_LEFT, _OFFSET = slice(8, 12), slice(-8, None)
"""Where the states of torch's generators have the count: on the CPU what is left, on a device what is drawn."""


class Lines(NamedTuple):
    """Lines of the script that ran before the loop, and may draw numbers."""

    text: str
    are_carried: bool
    """Whether they are those that draw for the next iteration, in a loop whose iterations need not draw alike."""


class EarlyDraws:
    """Compares how many random numbers the first iterations after a resume draw. For the training thread."""

    def __init__(self) -> None:
        self._created_at, self._at_creation = _frames(), _digests()
        self._drawn_from: str | None = None
        """States of the generators that were drawn from before the resume, as the session was created with."""
        self._saved: str | None = None
        """The same of the first start, if training resumed."""
        self._resumed_at: list[ScriptFrame] = []
        self._lines: Lines | None = None
        self._drawn: list[list[int]] = []
        """Numbers drawn so far, by generator, when the job resumed and after each iteration."""

    def state_dict(self) -> str | None:
        """Return the state of the generators that the first start drew from before it trained."""
        return self._saved or self._drawn_from

    def before_resume(self) -> None:
        """Note whether numbers have been drawn since the session was created, before their state is restored."""
        now = _digests()
        drawn_from = {name: state for name, state in self._at_creation.items() if now[name] != state}
        self._drawn_from = repr(drawn_from) if drawn_from else None

    def begin(self) -> None:
        """Note the same at a fresh start."""
        self.before_resume()
        self._created_at = []

    def resumed(self, saved: str | None) -> list[str]:
        """Record where the script resumes; describe numbers that it drew from generators that are not seeded.

        Called within `Session.resume` or `Session.batches`. `saved` is the `state_dict` of the checkpoint.
        """
        self._saved = saved
        self._resumed_at, self._drawn = _frames(), [_drawn()]
        created_at, self._created_at = self._created_at, []
        if saved is None or self._drawn_from in (None, saved):
            return []
        if (lines := _lines_between(created_at, self._resumed_at)) is None:
            return []
        return [
            f"the script draws random numbers between the creation of the session and the resume ({lines.text}), "
            "from generators that it does not seed: they are others at each start, and so is what follows from "
            "them, such as fixed noise or a split. Seed the generators, or keep what follows in holdfast.Variables"
        ]

    @property
    def is_waiting(self) -> bool:
        """Whether the next iteration is compared."""
        return bool(self._drawn)

    def iteration_ended(self, *, epoch_advanced: bool | None) -> list[str]:
        """Describe, once, the numbers that the script draws between the resume and its loop."""
        if not self._drawn:
            return []
        if len(self._drawn) == 1:
            self._lines = _lines_between(self._resumed_at, _frames())
            self._resumed_at = []
        self._drawn.append(_drawn())
        if self._lines is None or epoch_advanced:
            self._drawn = []
        if len(self._drawn) <= COMPARED_ITERATIONS:
            return []
        counts = [
            [(after - before) % PERIOD for before, after in zip(one, other, strict=False)]
            for one, other in zip(self._drawn, self._drawn[1:], strict=False)
        ]
        self._drawn = []
        first, *later = counts
        usual = max(later, key=later.count)
        if self._lines is None or first == usual:
            return []
        if later.count(usual) < (2 if self._lines.are_carried else len(later)):
            return []
        return [
            f"the script draws random numbers between the resume and its first iteration ({self._lines.text}): "
            "every start draws them again, so they are others after a resume, and those of the iterations, too. "
            "Draw them before session.resume() or session.batches(...), or keep what follows from them in "
            "holdfast.Variables"
        ]


def _digests() -> dict[str, str]:
    """Return a digest of the state of each global generator."""
    numpy = sys.modules.get("numpy.random")
    states = {"random": random.getstate(), "torch": torch.get_rng_state().tolist()}
    if numpy is not None:
        states["numpy"] = numpy.get_state()
    return {name: hashlib.blake2b(repr(each).encode(), digest_size=8).hexdigest() for name, each in states.items()}


def _drawn() -> list[int]:
    """Return the places of the global generators within their states, of which each number takes one or more."""
    numpy = sys.modules.get("numpy.random")
    of_numpy = numpy.get_state(legacy=False)["state"].get("pos", 0) if numpy is not None else 0
    of_torch = -int.from_bytes(bytes(torch.get_rng_state()[_LEFT].tolist()), "little")
    of_devices = [
        int.from_bytes(bytes(module.get_rng_state()[_OFFSET].tolist()), "little")
        for module in modules_in_use().values()
    ]
    return [random.getstate()[1][-1], of_numpy, of_torch, *of_devices]


def _frames() -> list[ScriptFrame]:
    """Return all frames of the script, the outermost first."""
    return script_frames(lambda code: ("In",) if is_module(code) else (), beyond_libraries=True)[::-1]


def _lines_between(before: list[ScriptFrame], after: list[ScriptFrame]) -> Lines | None:
    """Return the lines that ran between the resume and the loop; `None` if they draw nothing, or are not known."""
    if not (before and after):
        return None  # a library resumes, or ends the iterations
    found: list[tuple[str, ast.stmt]] = []
    carried: list[str] | None = None
    common = [one.code is other.code for one, other in zip(before, after, strict=False)]
    depth = common.index(False) if False in common else len(common)
    are_cells = all(frame.is_cell for frames in (before, after) for frame in frames[depth : depth + 1])
    if are_cells and depth < min(len(before), len(after)):
        found += _lines_of_cells(before[depth], after[depth])
        start, first_line = depth, 0
    elif not depth:
        before, start, first_line = [], 0, 0  # of another thread
    else:
        start, first_line = depth - 1, before[depth - 1].line
    for frame in before[depth:]:
        if frame.code.co_flags & inspect.CO_GENERATOR:
            continue  # it goes on in each iteration
        found += _lines(frame, frame.line, sys.maxsize)
    loops = [_loops(frame) for frame in after[start:]]
    for number, frame in enumerate(after[start:]):
        if number and frame.is_called_by_library and not any(loops[number:]):
            break  # the library may call it in each iteration
        first = 0 if number else first_line
        around = [each for each in loops[number] if not each.body[0].lineno <= first <= (each.end_lineno or 0)]
        if any(_does_more_at_times(each, frame.line) for each in around[:1]):
            carried = list(_carried(around[0]))  # the first iteration need not draw as many numbers as the others
        found += _lines(frame, first, around[0].lineno if around else frame.line)
        if around:
            break
    if carried is not None:
        found = [(path, each) for path, each in found if ast.unparse(each) in carried]
    by_file: dict[str, list[int]] = {}
    for path, statement in found:
        by_file.setdefault(path, []).append(statement.lineno)
    if not found:
        return None
    is_one = len(by_file) == 1 and not found[0][0].startswith(CELL)
    texts = (_numbers(lines) if is_one else f"{path} {_numbers(lines)}" for path, lines in by_file.items())
    return Lines(", ".join(texts), carried is not None)


def _numbers(lines: Iterable[int]) -> str:
    first, *more = sorted(set(lines))
    return f"lines {first} to {more[-1]}" if more else f"line {first}"


def _loops(frame: ScriptFrame) -> list[Loop]:
    function = function_of(frame.code)
    return loops_around(function, frame.line) if function is not None else []


def _lines_of_cells(before: ScriptFrame, after: ScriptFrame) -> Iterator[tuple[str, ast.stmt]]:
    """Yield the lines of the cells that ran between two cells of a notebook."""
    for number in range(_number_of_cell(before) + 1, _number_of_cell(after)):
        try:
            tree = ast.parse(before.values["In"][number])
        except (SyntaxError, ValueError, TypeError):
            continue
        yield from ((f"{CELL} {number}", each) for each in _drawing(tree, 0, sys.maxsize, ()))


def _number_of_cell(frame: ScriptFrame) -> int:
    """Return the number of the cell with the text of a frame that ran last; the number of cells if none has it."""
    cells, text = frame.values["In"], "".join(linecache.getlines(frame.code.co_filename)).strip()
    numbers = range(len(cells) - 1, -1, -1)
    return next((n for n in numbers if isinstance(cells[n], str) and cells[n].strip() == text), len(cells))


def _does_more_at_times(loop: Loop, line: int) -> bool:
    """Return whether a loop calls something under a condition before a line, such as an evaluation."""
    conditions = [each for each in loop.body if isinstance(each, ast.If) and each.lineno < line]
    return any(not is_reporting(call) for each in conditions for part in each.body for call in calls_in(part))


def _carried(loop: Loop) -> Iterator[str]:
    """Yield the assignments of a loop to variables that its next iteration reads first, such as the next batch."""
    first: dict[str, ast.Name] = {}
    for each in within(loop):
        if isinstance(each, ast.Name) and each.lineno < first.setdefault(each.id, each).lineno:
            first[each.id] = each
    for each in within(loop):
        if isinstance(each, ast.Assign):
            parts = (part for target in each.targets for part in ast.walk(target))
            names = [first[part.id] for part in parts if isinstance(part, ast.Name)]
            if any(isinstance(name.ctx, ast.Load) and name.lineno < each.lineno for name in names):
                yield ast.unparse(each)


def _lines(frame: ScriptFrame, first: int, last: int) -> Iterator[tuple[str, ast.stmt]]:
    """Yield the statements between two lines of a function that call something which may draw a number."""
    function = function_of(frame.code)
    if function is not None:
        name = os.path.basename(frame.code.co_filename)
        if frame.is_cell:
            name = f"{CELL} {_number_of_cell(frame)}"
        yield from ((name, each) for each in _drawing(function, first, last, (first, frame.line)))


def _drawing(function: ast.AST, first: int, last: int, places: tuple[int, ...]) -> Iterator[ast.stmt]:
    """Yield the statements between two lines that call something, in branches only that have one of `places`.

    What depends on another condition is left out: a script makes there what no checkpoint has yet.
    """
    left = [function]
    while left:
        for each in ast.iter_child_nodes(left.pop()):
            if not isinstance(each, ast.stmt) or isinstance(each, Scope):
                continue
            if isinstance(each, ast.If):
                branches = [branch for branch in (each.body, each.orelse) if _has_any(branch, places)]
                left += [ast.Module(body=branch, type_ignores=[]) for branch in branches]
                continue
            left.append(each)
            is_simple = first < each.lineno < last and not hasattr(each, "body")
            if is_simple and not all(map(is_reporting, calls_in(each))):
                yield each


def _has_any(branch: list[ast.stmt], lines: tuple[int, ...]) -> bool:
    return any(part.lineno <= line <= (part.end_lineno or 0) for part in branch for line in lines)
