"""Random numbers that a script draws between the session and its loop: each start draws them again.

Before the resume they are the same ones if the script seeds its generators. After it they are not, and the first
iteration draws more numbers than the later ones.
"""

from __future__ import annotations

import ast
import hashlib
import random
import sys
from collections.abc import Iterator

import torch

from holdfast.accelerators import modules_in_use
from holdfast.inventory.script_code import (
    Loop,
    Scope,
    ScriptFrame,
    calls_in,
    function_of,
    is_reporting,
    loops_around,
    script_frames,
)

COMPARED_ITERATIONS = 4
"""The first iteration after a resume is compared with the others of so many, which must draw equally many."""
PERIOD = 624
"""Numbers are counted modulo the length of the state of the Mersenne Twister."""
_LEFT, _OFFSET = slice(8, 12), slice(-8, None)
"""Where the states of torch's generators have the count: on the CPU what is left, on a device what is drawn."""


class EarlyDraws:
    """Compares how many random numbers the first iterations after a resume draw. For the training thread."""

    def __init__(self) -> None:
        self._created_at, self._at_creation = script_frames(), _digest()
        self._drawn_from: str | None = None
        """State of the generators at the creation of the session, if numbers were drawn before the resume."""
        self._saved: str | None = None
        """The same of the first start, if training resumed."""
        self._resumed_at: list[ScriptFrame] = []
        self._lines: str | None = None
        self._drawn: list[list[int]] = []
        """Numbers drawn so far, by generator, when the job resumed and after each iteration."""

    def state_dict(self) -> str | None:
        """Return the state of the generators when the first start created the session, if it drew numbers then."""
        return self._saved or self._drawn_from

    def before_resume(self) -> None:
        """Note whether numbers have been drawn since the session was created, before their state is restored."""
        self._drawn_from = self._at_creation if _digest() != self._at_creation else None

    def begin(self) -> None:
        """Note the same at a fresh start."""
        self.before_resume()
        self._created_at = []

    def resumed(self, saved: str | None) -> list[str]:
        """Record where the script resumes; describe numbers that it drew from generators that are not seeded.

        Called within `Session.resume` or `Session.batches`. `saved` is the `state_dict` of the checkpoint.
        """
        self._saved = saved
        self._resumed_at, self._drawn = script_frames(), [_drawn()]
        created_at, self._created_at = self._created_at, []
        if saved is None or self._drawn_from in (None, saved):
            return []
        if (lines := _lines_between(created_at, self._resumed_at)) is None:
            return []
        return [
            f"the script draws random numbers between the creation of the session and the resume ({lines}), from "
            "generators that it does not seed: they are others at each start, and so is what follows from them, "
            "such as fixed noise or a split. Seed the generators, or keep what follows in holdfast.Variables"
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
            self._lines = _lines_between(self._resumed_at, script_frames())
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
        if first == later[0] or any(each != later[0] for each in later):
            return []
        return [
            f"the script draws random numbers between the resume and its first iteration ({self._lines}): every "
            "start draws them again, so that they are others after a resume, and those of the iterations, too. "
            "Draw them before session.resume() or session.batches(...), or keep what follows from them in "
            "holdfast.Variables"
        ]


def _digest() -> str:
    numpy = sys.modules.get("numpy.random")
    states = random.getstate(), numpy.get_state() if numpy is not None else None, torch.get_rng_state().tolist()
    return hashlib.blake2b(repr(states).encode(), digest_size=8).hexdigest()


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


def _lines_between(resumed: list[ScriptFrame], now: list[ScriptFrame]) -> str | None:
    """Return the lines that ran between the resume and the loop; `None` if they draw nothing, or are not known."""
    before, after = resumed[::-1], now[::-1]  # from the outermost function on
    found: list[tuple[str, int]] = []
    common = [one.code is other.code for one, other in zip(before, after, strict=False)]
    depth = common.index(False) if False in common else len(common)
    if not depth:
        return None
    for frame in before[depth:]:
        found += _lines(frame, frame.line, sys.maxsize)
    for number, frame in enumerate(after[depth - 1 :]):
        first = before[depth - 1].line if not number else 0
        function = function_of(frame.code)
        loops = loops_around(function, frame.line) if function is not None else []
        loops = [each for each in loops if not each.body[0].lineno <= first <= (each.end_lineno or 0)]
        if any(_does_more_at_times(each, frame.line) for each in loops[:1]):
            return None  # the first iteration need not draw as many numbers as the others
        found += _lines(frame, first, loops[0].lineno if loops else frame.line)
        if loops:
            break
    if not found:
        return None
    numbers = [number for _, number in found]
    return f"line {numbers[0]}" if len(set(numbers)) == 1 else f"lines {min(numbers)} to {max(numbers)}"


def _does_more_at_times(loop: Loop, line: int) -> bool:
    """Return whether a loop calls something under a condition before a line, such as an evaluation."""
    conditions = [each for each in loop.body if isinstance(each, ast.If) and each.lineno < line]
    return any(not is_reporting(call) for each in conditions for part in each.body for call in calls_in(part))


def _lines(frame: ScriptFrame, first: int, last: int) -> Iterator[tuple[str, int]]:
    """Yield the lines between two in a function that call something which may draw a number.

    What depends on a condition is left out: a script makes there what no checkpoint has yet.
    """
    function = function_of(frame.code)
    left: list[ast.AST] = [] if function is None else [function]
    while left:
        for each in ast.iter_child_nodes(left.pop()):
            if isinstance(each, ast.If | ast.expr | Scope) or not isinstance(each, ast.stmt):
                continue
            left.append(each)
            is_simple = first < each.lineno < last and not hasattr(each, "body")
            if is_simple and not all(map(is_reporting, calls_in(each))):
                yield frame.code.co_filename, each.lineno
