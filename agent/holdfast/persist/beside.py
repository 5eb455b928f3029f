"""One computation on a thread of its own, whose result another thread will want."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Beside(Generic[T]):
    """Runs `compute` at once on a thread, or when it is asked for where there can be none."""

    def __init__(self, name: str, compute: Callable[[], T]) -> None:
        self._compute: Callable[[], T] | None = compute
        self._found: list[T] = []
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # as many threads as there may be, or the interpreter is ending
            self._thread = None

    def result(self) -> T:
        self.wait()
        if self._error is not None:
            raise self._error
        if self._compute is not None:
            self._found.append(self._compute())
            self._compute = None
        return self._found[0]

    def wait(self) -> None:
        """Until it is at work no more."""
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        assert self._compute is not None
        try:
            self._found.append(self._compute())
        except BaseException as error:  # a thread's edge: it is raised where the result is wanted
            self._error = error
        self._compute = None  # it may hold what holds this, and all the memory of a snapshot with it
