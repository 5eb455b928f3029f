"""Pause points, at which a process waits so that a test can kill it, and other actions at a call of a function."""

from __future__ import annotations

import functools
import inspect
import os
import signal
import socket
from collections.abc import Callable
from typing import Any


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


def run_before(owner: Any, name: str, act: Callable[..., object]) -> None:
    """Call `act` with the arguments of `owner.name` before each call of it."""
    original = getattr(owner, name)

    def acting(*args: Any, **options: Any) -> Any:
        act(*args)
        return original(*args, **options)

    setattr(owner, name, acting)


def run_after(owner: Any, name: str, act: Callable[..., object]) -> None:
    original = getattr(owner, name)

    def acting(*args: Any, **options: Any) -> Any:
        result = original(*args, **options)
        act(*args)
        return result

    setattr(owner, name, acting)


def always(*args: Any, **options: Any) -> bool:
    return True


def reach(point: str) -> None:
    """Tell the test; go on when it lets this process, if ever."""
    if point == os.environ.get("STRIKE_AT"):
        with socket.create_connection(("127.0.0.1", int(os.environ["STRIKE_PORT"]))) as line:
            line.recv(1)


def watch(owner: Any, name: str, *, before: str = "", after: str = "", when: Callable[..., bool] = always) -> None:
    """Let a function or method tell that it is called, and has returned, where `when` says so of its arguments."""
    call = getattr(owner, name)

    @functools.wraps(call)
    def watched(*args: Any, **options: Any) -> Any:
        if not when(*args, **options):
            return call(*args, **options)
        reach(before)
        result = call(*args, **options)
        reach(after)
        return result

    setattr(owner, name, watched)


def watch_answer(owner: Any, name: str, after: str, when: Callable[..., bool]) -> None:
    """The same of its end; `when` is asked of what it has returned, and of its arguments."""
    call = getattr(owner, name)

    @functools.wraps(call)
    def watched(*args: Any, **options: Any) -> Any:
        result = call(*args, **options)
        if when(result, *args):
            reach(after)
        return result

    @functools.wraps(call)
    async def awaited(*args: Any, **options: Any) -> Any:
        result = await call(*args, **options)
        if when(result, *args):
            reach(after)
        return result

    setattr(owner, name, awaited if inspect.iscoroutinefunction(call) else watched)
