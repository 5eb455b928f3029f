"""One bounded pool of threads for digests, parallel reads and writes, and copies.

Its threads start when there is work, stay, and run at a lowered CPU priority. They are daemons, since a store that
hangs must not keep the interpreter from ending: `concurrent.futures` would wait for it.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import queue
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

THREADS = 8
"""Also on two cores: a device answers late what it was not asked for before."""
NICENESS = 10
"""The threads of training go first where there are fewer cores than work."""


def lower_cpu_priority() -> None:
    """For the calling thread and what it starts from here on; a trainer that is nicer still sets the measure."""
    if sys.platform == "linux":  # where niceness belongs to a thread, not to the whole process
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):  # a sandbox without that call
            os.setpriority(os.PRIO_PROCESS, thread, max(NICENESS, os.getpriority(os.PRIO_PROCESS, thread)))


def submit(work: Callable[[], T]) -> Future[T]:
    """Run `work` on a thread of the pool, or on this one where no thread can be started."""
    global _pool
    if _pool.process != os.getpid():  # a forked child has none of its parent's threads
        _pool = _Pool()
    return _pool.submit(work)


def share(work: Callable[[], None], count: int) -> None:
    """Run `work` on this thread and on up to `count` - 1 threads of the pool, and wait until all have ended.

    Raises what one of them raised. This thread gets on with the work however busy the pool is.
    """
    helpers = [submit(work) for _ in range(count - 1)]
    try:
        work()
    finally:
        started = [helper for helper in helpers if not helper.cancel()]
        concurrent.futures.wait(started)
    for helper in started:
        helper.result()


class _Pool:
    """The threads of one process."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = self._unfinished = 0

    def submit(self, work: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        with self._lock:
            self._unfinished += 1
            if self._threads < min(self._unfinished, THREADS):
                name = f"holdfast-io-{self._threads}"
                with contextlib.suppress(RuntimeError):  # no more threads, or the interpreter is ending
                    threading.Thread(target=self._run, name=name, daemon=True).start()
                    self._threads += 1
            has_threads = self._threads > 0
        self._tasks.put((future, work))
        if not has_threads:
            self._do_next()
        return future

    def _run(self) -> None:
        lower_cpu_priority()
        while True:
            self._do_next()

    def _do_next(self) -> None:
        future, work = self._tasks.get()
        try:
            if future.set_running_or_notify_cancel():
                future.set_result(work())
        except BaseException as error:  # raised again where the result is asked for
            future.set_exception(error)
        finally:
            with self._lock:
                self._unfinished -= 1
            del future, work  # the traceback of an error holds this frame, and what it refers to


_pool = _Pool()
