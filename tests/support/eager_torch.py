"""Import this before an optimizer is made, so that a trainer starts in half the time.

An optimizer imports torch's compiler, which takes as long as torch itself, for two functions that do nothing
outside of `torch.compile`. They are here. Any other name of `torch._dynamo` raises an AttributeError: a job of
several ranks needs more of it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def graph_break(*_: Any, **__: Any) -> None: ...


def disable(function: Callable[..., Any], *_: Any, **__: Any) -> Callable[..., Any]:
    return function


if "torch._dynamo" not in sys.modules:
    without_compiler = ModuleType("torch._dynamo")
    without_compiler.__dict__.update(graph_break=graph_break, disable=disable)
    sys.modules["torch._dynamo"] = without_compiler
