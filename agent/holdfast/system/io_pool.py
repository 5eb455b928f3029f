"""Bounded pools of daemon threads for digests, parallel reads and writes, and copies.

Background work runs at a lowered CPU priority. Work that a thread of normal priority waits for, such as a restore,
runs on a separate pool at normal priority: otherwise any other process on the machine would delay it.

The threads are daemons, because a store that hangs must not keep the interpreter from exiting:
`concurrent.futures.ThreadPoolExecutor` would wait for it.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

THREADS = 8
"""Maximum per pool, also on two cores: storage devices need several requests at a time."""
NICENESS = 10
"""Niceness of background threads, so that training threads run first where cores are scarce."""


def lower_cpu_priority() -> None:
    """Lower the CPU priority of the calling thread and of what it starts from now on; never raises it."""
    if sys.platform == "linux":  # niceness is per thread on Linux only
        with contextlib.suppress(OSError):  # forbidden by a sandbox
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), max(NICENESS, _niceness()))


def _niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def submit(work: Callable[[], T]) -> Future[T]:
    """Run `work` in the background, or on this thread if no thread can be started."""
    return _pool(in_background=True).submit(work)


def submit_helpers(work: Callable[[], None], count: int) -> list[Future[None]]:
    """Run `work` on up to `count` threads with the priority of this thread, which waits for them."""
    pool = _pool(in_background=sys.platform == "linux" and _niceness() >= NICENESS)
    return [pool.submit(work) for _ in range(count)]


def share_out(work: Callable[[T], object], items: Iterable[T], count: int) -> None:
    """Call `work` with each item, on this thread and on up to `count` - 1 threads of a pool, as `share` does."""
    left = collections.deque(items)

    def run() -> None:
        while left:
            try:
                item = left.popleft()
            except IndexError:  # another thread took the last one
                return
            work(item)

    share(run, max(1, min(count, len(left))))


def share(work: Callable[[], None], count: int) -> None:
    """Run `work` on this thread and on up to `count` - 1 threads of a pool, and wait until all have ended.

    Raises what one of them raised. This thread makes progress however busy the pool is.
    """
    helpers = submit_helpers(work, count - 1)
    try:
        work()
    finally:
        started = [helper for helper in helpers if not helper.cancel()]
        concurrent.futures.wait(started)
    for helper in started:
        helper.result()


class DaemonPool:
    """Threads that start when there is work, and stay until the pool is closed."""

    def __init__(self, name: str, most_threads: int, *, in_background: bool) -> None:
        self.process = os.getpid()
        self._name, self._most_threads, self._in_background = name, most_threads, in_background
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._unfinished = 0

    def submit(self, work: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        with self._lock:
            self._unfinished += 1
            if len(self._threads) < min(self._unfinished, self._most_threads):
                name = f"{self._name}-{len(self._threads)}"
                thread = threading.Thread(target=self._run, name=name, daemon=True)
                with contextlib.suppress(RuntimeError):  # no more threads, or the interpreter is exiting
                    thread.start()
                    self._threads.append(thread)
            has_threads = len(self._threads) > 0
        self._tasks.put((future, work))
        if not has_threads:
            self._do_next()
        return future

    def close(self, at_most_seconds: float) -> None:
        """End the threads, and wait a limited time for those that are busy."""
        for _ in self._threads:
            self._tasks.put(None)
        deadline = time.monotonic() + at_most_seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        if self._in_background:
            lower_cpu_priority()
        while self._do_next():
            pass

    def _do_next(self) -> bool:
        if (task := self._tasks.get()) is None:
            return False
        future, work = task
        try:
            if future.set_running_or_notify_cancel():
                future.set_result(work())
        except BaseException as error:  # raised again where the result is requested
            future.set_exception(error)
        finally:
            with self._lock:
                self._unfinished -= 1
            del future, work, task  # the traceback of an error holds this frame and everything it refers to
        return True


def _pool(*, in_background: bool) -> DaemonPool:
    if _pools[in_background].process != os.getpid():  # a forked child has none of its parent's threads
        _pools[in_background] = _new_pool(in_background)
    return _pools[in_background]


def _new_pool(in_background: bool) -> DaemonPool:
    name = "holdfast-io" if in_background else "holdfast-load"
    return DaemonPool(name, THREADS, in_background=in_background)


_pools = {in_background: _new_pool(in_background) for in_background in (True, False)}
