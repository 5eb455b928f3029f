"""Memory that a fork leaves out of the child, so that the parent pays for no copy-on-write.

After a plain fork each page that training writes next is copied first: the step after it takes many times as
long. Training's own tensors are of no use to the child, which reads the arena, so they are left out.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import threading
from collections.abc import Iterable

MADV_DONTFORK, MADV_DOFORK = 10, 11

_forking = threading.Lock()
_left_out = threading.local()
_libc = ctypes.PyDLL(None)
"""Keeps the interpreter lock: to give it away and take it back hundreds of times would take far longer."""
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


@functools.cache
def prepare() -> None:
    """Once a process, before the first fork.

    Hooks, rather than calls around os.fork, so that a fork by another thread (a loader's workers) falls before or
    after and gets all memory; and so that the lock is taken in the same order as those of other hooks.
    """
    os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_forking.release)


def fork_without(ranges: Iterable[tuple[int, int]]) -> int:
    """Like os.fork, but the child lacks the pages that lie within (address, bytes) of `ranges` as a whole."""
    _left_out.pages = list(_pages(ranges))
    try:
        return os.fork()
    finally:
        _left_out.pages = []


def _pages(ranges: Iterable[tuple[int, int]]) -> Iterable[tuple[int, int]]:
    page = mmap.PAGESIZE
    for address, size_bytes in ranges:
        start, end = -(-address // page) * page, (address + size_bytes) // page * page
        if start < end:
            yield start, end - start


def _advise(advice: int) -> None:
    for start, size_bytes in getattr(_left_out, "pages", ()):
        _libc.madvise(start, size_bytes, advice)  # what is unmapped by now is passed over


def _before() -> None:
    _forking.acquire()
    _advise(MADV_DONTFORK)


def _after_in_parent() -> None:
    _advise(MADV_DOFORK)
    _forking.release()
