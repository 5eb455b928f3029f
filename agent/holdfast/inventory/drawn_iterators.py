"""Iterators of the script that its loop draws from, and whose position no checkpoint holds."""

from __future__ import annotations

import ast
import functools
import types
from collections.abc import Iterator

from holdfast.inventory.script_code import (
    calls_in,
    function_of,
    loops_around,
    resolve,
    root_of,
    script_frames,
    within,
)


def unsaved_iterators() -> list[str]:
    """Describe generators that the loop around the current call draws from, and that begin anew at each start.

    Empty if the script moves one to its position, in a loop of its own. Called within `Session.step`.
    """
    for frame in script_frames(_names):
        function = function_of(frame.code)
        if function is None:
            continue
        for node in _drawn(function, frame.line):
            found = resolve(node, frame.values)
            if not isinstance(found, types.GeneratorType) or _begins_at_position(function, node):
                continue
            if _has_position(found.gi_code):
                return [
                    f"the loop draws from the generator `{ast.unparse(node)}`, and no checkpoint holds its "
                    "position: after a resume it begins anew. Draw from session.batches(...) over it, or move it "
                    "to its position, which you keep in holdfast.Variables"
                ]
    return []


@functools.lru_cache(16)
def _names(code: types.CodeType) -> frozenset[str]:
    function = function_of(code)
    nodes = (_iterated(each) for each in within(function)) if function is not None else ()
    return frozenset(name for each in nodes if each is not None and (name := root_of(each)) is not None)


def _iterated(node: ast.AST) -> ast.AST | None:
    """Return what a `for` iterates over, or `next` draws from."""
    match node:
        case ast.For(iter=iterated):
            while isinstance(iterated, ast.Call) and iterated.args:
                iterated = iterated.args[0]  # enumerate, tqdm
            return iterated
        case ast.Call(func=ast.Name(id="next"), args=[drawn, *_]):
            return drawn
    return None


def _drawn(function: ast.AST, line: int) -> Iterator[ast.AST]:
    """Yield what the loops around a line draw from, unless another loop of the function does as well."""
    around = loops_around(function, line)
    inside = {id(part) for loop in around for part in (loop, *within(loop))}
    nodes = [(each, drawn) for each in within(function) if (drawn := _iterated(each)) is not None]
    loops = [
        each for each in within(function) if isinstance(each, (ast.For, ast.While)) and id(each) not in inside
    ]
    moved = {ast.unparse(drawn) for loop in loops for each in (loop, *within(loop)) if (drawn := _iterated(each))}
    yield from (drawn for each, drawn in nodes if id(each) in inside and ast.unparse(drawn) not in moved)


def _begins_at_position(function: ast.AST, drawn: ast.AST) -> bool:
    """Whether the script makes it from the iteration of the session, as in `stream(data, session.iteration)`."""
    read = {ast.unparse(drawn)}
    assigned = [each for each in ast.walk(function) if isinstance(each, ast.Assign)]
    values = [each.value for each in assigned if any(ast.unparse(target) in read for target in each.targets)]
    names = {part.id for value in values for part in ast.walk(value) if isinstance(part, ast.Name)}
    values += [each.value for each in assigned if any(ast.unparse(target) in names for target in each.targets)]
    attributes = (getattr(part, "attr", "") for value in values for part in ast.walk(value))
    return any(each in ("iteration", "resume") for each in attributes)


def _has_position(code: types.CodeType) -> bool:
    """Whether a generator goes through something, and does not only draw random numbers."""
    function = function_of(code)
    if function is None:
        return False
    for each in ast.walk(function):
        if isinstance(each, ast.YieldFrom) or any(_is_next(call) for call in calls_in(each)):
            return True
        if isinstance(each, ast.For) and any(isinstance(part, ast.Yield) for part in within(each)):
            names = {part.id for part in ast.walk(each.target) if isinstance(part, ast.Name)}
            if any(
                isinstance(part, ast.Name) and part.id in names for line in each.body for part in ast.walk(line)
            ):
                return True
    indices = {part.id for each in ast.walk(function) if isinstance(each, ast.Subscript)
               for part in ast.walk(each.slice) if isinstance(part, ast.Name)}  # fmt: skip
    added = (each.target for each in ast.walk(function) if isinstance(each, ast.AugAssign))
    return any(isinstance(target, ast.Name) and target.id in indices for target in added)


def _is_next(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Name) and call.func.id == "next"
