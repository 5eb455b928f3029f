"""The code of the running script: its frames, its loops, and what depends on a variable.

It is read from source files, where they exist. Frames are looked at, never kept: a frame holds tensors.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import operator
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from holdfast.inventory.attribute_walk import LIBRARIES, is_ignored, split_names, words_of
from holdfast.state.references import attributes

MOST_FRAMES = 32
MOST_LINES = 5000
"""A longer file is not parsed."""
UNSHARED = 3
"""What `sys.getrefcount` counts for the variables of a frame, if the script has not kept `locals()`."""
MISSING = object()
_STANDARD_LIBRARY = tuple({f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib")})
_REPORTING = split_names("""
    print log logs logger logging info debug warning warn write writer scalar scalars description postfix save plot
    show report record display mark annotate pbar tqdm bar progress meter figure hist dump flush mfu flops
    throughput speed memory elapsed eta stats summary histogram image images text video audio embedding
""")
"""Words in the names of functions that only report."""
_COMPUTING = split_names("""
    item mean sum float int str len round max min abs range enumerate zip time perf_counter append extend join
    format items keys values get sorted isinstance exp sqrt cpu detach numpy tolist get_last_lr divmod bool
    strftime
    empty_cache collect state_dict all_reduce reduce gather gather_for_metrics barrier dumps now norm parameters
    named_parameters range_push range_pop
    memory_allocated max_memory_allocated no_grad inference_mode synchronize zero_grad on_restored
""")
"""Names of functions that only compute, or keep what is reported."""
_METHODS = split_names("train eval to cuda batches resume every config")
"""Names of methods that draw no number."""
_CONTAINERS = split_names("zeros empty full list dict defaultdict deque zeros_like ones")
"""Names of functions that make what is filled afterwards."""
_SIZED = (list, tuple, str, bytes, dict, range)
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}
Loop = ast.For | ast.While | ast.AsyncFor
Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda


class ScriptFrame(NamedTuple):
    """Where a function of the script is at one instant."""

    code: types.CodeType
    line: int
    values: dict[str, Any]
    """The values of the variables that were asked for."""
    is_called_by_library: bool = False
    """Whether a library has called it, perhaps in each iteration."""

    @property
    def is_cell(self) -> bool:
        """Whether it is a cell of a notebook, whose variables include the texts of all cells."""
        return isinstance(self.values.get("In"), list) and is_module(self.code)


def is_module(code: types.CodeType) -> bool:
    """Whether code is that of a module or of a cell of a notebook."""
    return code.co_name == "<module>" or code.co_name.startswith("<cell line")


def script_frames(
    names: Callable[[types.CodeType], Iterable[str]] = lambda code: (), *, beyond_libraries: bool = False
) -> list[ScriptFrame]:
    """Return the frames of the script that called Holdfast, innermost first, with the values of some variables.

    Empty where a library called it. Frames of libraries are left out; with `beyond_libraries`, those of the script
    that called them are not.
    """
    frame: types.FrameType | None = inspect.currentframe()
    while frame is not None and _package(frame) == "holdfast":
        frame = frame.f_back
    found: list[ScriptFrame] = []
    while frame is not None and len(found) < MOST_FRAMES:
        if not _is_of_library(frame):
            found.append(ScriptFrame(frame.f_code, frame.f_lineno, _values(frame, names(frame.f_code))))
        elif not found or not beyond_libraries:
            break
        else:
            found[-1] = found[-1]._replace(is_called_by_library=True)
        frame = frame.f_back
    return found


def _is_of_library(frame: types.FrameType) -> bool:
    path = frame.f_code.co_filename
    is_installed = "site-packages" in path or "dist-packages" in path or path.startswith(_STANDARD_LIBRARY)
    return is_installed or path.startswith("<frozen") or _package(frame) in LIBRARIES


def _package(frame: types.FrameType) -> str:
    name = frame.f_globals.get("__name__")
    return name.partition(".")[0] if isinstance(name, str) else ""


def _values(frame: types.FrameType, names: Iterable[str]) -> dict[str, Any]:
    if not (names := list(names)):
        return {}
    found = frame.f_locals
    values = {name: found[name] for name in names if name in found}
    values |= {name: frame.f_globals[name] for name in names if name not in found and name in frame.f_globals}
    is_copy = sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED
    if is_copy and sys.getrefcount(found) == UNSHARED:
        found.clear()  # the frame keeps this copy, and in it the tensors of this iteration
    return values


@functools.lru_cache(16)
def _tree(path: str) -> ast.AST | None:
    lines = linecache.getlines(path)
    if not lines or len(lines) > MOST_LINES:
        return None
    try:
        return ast.parse("".join(lines))
    except (SyntaxError, ValueError):
        return None


@functools.lru_cache(64)
def function_of(code: types.CodeType) -> ast.AST | None:
    """Return the syntax tree of a function, or of a module; `None` if there is no source."""
    if (tree := _tree(code.co_filename)) is None:
        return None
    if is_module(code):
        return tree
    functions = (each for each in ast.walk(tree) if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)))
    return next((each for each in functions if _starts_at(each, code)), None)


def _starts_at(function: ast.FunctionDef | ast.AsyncFunctionDef, code: types.CodeType) -> bool:
    first = min([function.lineno, *(each.lineno for each in function.decorator_list)])
    return function.name == code.co_name and first == code.co_firstlineno


def source_line(code: types.CodeType, node: ast.AST) -> str:
    """Return the place and the first line of a node, to report."""
    number = getattr(node, "lineno", 0)
    return f"line {number}, `{linecache.getline(code.co_filename, number).strip()[:100]}`"


def within(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes below a node, except the inside of other functions and classes."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, Scope):
            yield child
            yield from within(child)


def loops_around(function: ast.AST, line: int) -> list[Loop]:
    """Return the loops of a function whose body has a line, the outermost first."""
    loops = (each for each in within(function) if isinstance(each, Loop))
    return [each for each in loops if each.body[0].lineno <= line <= (each.body[-1].end_lineno or 0)]


def resolve(node: ast.AST, values: dict[str, Any]) -> Any:
    """Return the value of a variable, an attribute or an entry of a dict, without running code of the script."""
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return values.get(name, MISSING)
        case ast.Attribute(value=holder, attr=name):
            return attributes(resolve(holder, values)).get(name, MISSING)
        case ast.Subscript(value=holder, slice=ast.Constant(value=key)):
            found = resolve(holder, values)
            return dict.get(found, key, MISSING) if type(found) is dict else MISSING
    return MISSING


def whole_number(node: ast.AST, values: dict[str, Any]) -> int | None:
    """Return the value of an expression of whole numbers and sizes, such as `len(data) // 8`, `x.size(0) - 1`."""
    match node:
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            one, other = whole_number(left, values), whole_number(right, values)
            if one is None or other is None or (other == 0 and isinstance(op, ast.FloorDiv)):
                return None
            return _OPERATORS[type(op)](one, other)
        case ast.Call(func=ast.Name(id="len"), args=[held]):
            found = resolve(held, values)
            return len(found) if type(found) in _SIZED or (_is_array(found) and found.ndim) else None
        case (
            ast.Call(func=ast.Attribute(value=held, attr="size"), args=[ast.Constant(value=int(axis))])
            | ast.Subscript(
                value=ast.Call(func=ast.Attribute(value=held, attr="size"), args=[]),
                slice=ast.Constant(value=int(axis)),
            )
            | ast.Subscript(value=ast.Attribute(value=held, attr="shape"), slice=ast.Constant(value=int(axis)))
        ):
            found = resolve(held, values)
            return int(found.shape[axis]) if _is_array(found) and axis < found.ndim else None
    found = resolve(node, values)
    return found if type(found) is int else None


def _is_array(item: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return type(item) is torch.Tensor or (numpy is not None and type(item) is numpy.ndarray)


def root_of(node: ast.AST) -> str | None:
    """Return the name of the variable with which an expression of attributes and entries begins."""
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def is_reporting(call: ast.Call) -> bool:
    """Whether a call only reports, or computes a number, as far as its name says."""
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if name in ("update", "step", "set", "reset") and isinstance(function, ast.Attribute):
        holder = ast.unparse(function.value).rpartition(".")[2]
        return bool(words_of(holder) & _REPORTING) or holder == "session"
    is_method = isinstance(function, ast.Attribute) and name in _METHODS
    return is_method or bool(words_of(name) & _REPORTING) or name in _COMPUTING


def calls_in(node: ast.AST) -> Iterator[ast.Call]:
    return (each for each in (node, *within(node)) if isinstance(each, ast.Call))


class Dependents:
    """Finds what depends on a variable of a function, beyond what is only reported.

    Args:
        function: the syntax tree of the function.
        variable: text of the variable, such as `i` or `self.step`.
        is_same: returns whether an expression has the same value in spite of a change of the variable.
        is_off: returns whether a condition is an option that is off, so that its branch does not run.
    """

    def __init__(
        self,
        function: ast.AST,
        variable: str,
        is_same: Callable[[ast.BinOp], bool],
        is_off: Callable[[ast.AST], bool],
    ) -> None:
        self._function, self._is_same, self._is_off = function, is_same, is_off
        self._variable, self._tainted = variable, {variable}
        self._found: ast.AST | None = None
        self._is_condition = False
        """Whether it is the condition or loop under which something else is done."""

    def first(self) -> ast.AST | None:
        """Return the first statement that depends on it; `None` if nothing does."""
        count = -1
        while self._found is None and count < len(self._tainted):
            count = len(self._tainted)
            self._visit(getattr(self._function, "body", []), is_under=False)
        return self._found

    def _visit(self, body: Iterable[ast.stmt], *, is_under: bool) -> None:
        for statement in body:
            if self._found is not None:
                return
            if not isinstance(statement, Scope):
                self._statement(statement, is_under)

    def _statement(self, statement: ast.stmt, is_under: bool) -> None:
        heads: list[ast.AST | None] = [getattr(statement, name, None) for name in ("test", "iter", "subject")]
        head = next((each for each in heads if each is not None), None)
        blocks = [getattr(statement, name, []) for name in ("body", "orelse", "finalbody")]
        blocks += [each.body for each in (*getattr(statement, "handlers", []), *getattr(statement, "cases", []))]
        if isinstance(statement, ast.If) and self._is_off(statement.test):
            self._visit(statement.orelse, is_under=is_under)
            return
        if any(blocks):
            is_read = head is not None and self._reads(head)
            if is_read and isinstance(statement, (ast.For, ast.AsyncFor)):
                self._assign(statement, statement.target, None)
            if is_under and head is not None:
                self._calls(statement, head)
            for block in blocks:
                self._visit(block, is_under=is_under or is_read)
            if is_read and self._found is not None and not self._is_condition:
                self._found, self._is_condition = statement, True
            return
        value = getattr(statement, "value", None)
        is_read = value is not None and self._reads(value)
        if isinstance(statement, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
            if is_under and value is not None:
                self._calls(statement, value)
            if is_under or is_read:
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                for target in targets:
                    self._assign(statement, target, value)
        elif isinstance(statement, (ast.Break, ast.Continue, ast.Return, ast.Raise)) and is_under:
            self._found = statement
        elif isinstance(statement, ast.Expr) and (is_under or is_read):
            self._calls(statement, statement.value)

    def _assign(self, statement: ast.stmt, target: ast.AST, value: ast.AST | None) -> None:
        text = ast.unparse(target)
        if text == self._variable:
            return
        if isinstance(target, (ast.Tuple, ast.List)):
            for each in target.elts:
                self._assign(statement, each, value)
        elif isinstance(target, ast.Name):
            self._tainted.add(target.id)
        elif isinstance(target, ast.Attribute) and is_ignored(target.attr):
            return
        elif isinstance(target, ast.Subscript) and self._is_own_container(target.value):
            self._tainted.add(ast.unparse(target.value))
        else:
            self._found = statement

    def _is_own_container(self, holder: ast.AST) -> bool:
        """Whether a list, dict or tensor is one that the function has made, to fill it."""
        text = ast.unparse(holder)
        assigned = (
            each.value for each in within(self._function) if isinstance(each, ast.Assign)
            and any(ast.unparse(target) == text for target in each.targets)
        )  # fmt: skip
        return any(isinstance(each, (ast.List, ast.Dict, ast.ListComp)) or _makes(each) for each in assigned)

    def _calls(self, statement: ast.stmt, expression: ast.AST) -> None:
        if not all(map(is_reporting, calls_in(expression))):
            self._found = statement

    def _reads(self, expression: ast.AST) -> bool:
        if isinstance(expression, ast.BinOp) and isinstance(expression.op, ast.Mod) and self._is_same(expression):
            return False
        is_variable = isinstance(expression, (ast.Name, ast.Attribute, ast.Subscript))
        if is_variable and ast.unparse(expression) in self._tainted:
            return True
        before = self._tainted
        if isinstance(expression, Comprehension):  # its variables are others than those of the function
            self._tainted = before - {ast.unparse(each.target) for each in expression.generators}
        found = any(self._reads(each) for each in ast.iter_child_nodes(expression) if not isinstance(each, Scope))
        self._tainted = before
        return found


def _makes(value: ast.AST) -> bool:
    names = (each.func for each in calls_in(value))
    return any((getattr(each, "attr", None) or getattr(each, "id", "")) in _CONTAINERS for each in names)
