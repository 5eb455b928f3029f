"""What the kernel does with this process's memory in one call, without the interpreter lock."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

MOST_SPANS = 1024
"""The most that one call takes (IOV_MAX)."""
MADV_POPULATE_WRITE = 23


@functools.cache
def can_share() -> bool:
    """Whether there can be memory that another process maps; a sandbox may forbid it."""
    try:
        os.close(os.memfd_create("holdfast-try"))
    except (AttributeError, OSError):
        return False
    return True


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether its elements lie in host memory one behind the other, as they are."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def bytes_of(tensor: torch.Tensor) -> memoryview:
    array = (ctypes.c_ubyte * (tensor.numel() * tensor.element_size())).from_address(tensor.data_ptr())
    return memoryview(array).cast("B")


class _Vector(ctypes.Structure):
    """struct iovec"""

    _fields_ = (("address", ctypes.c_void_p), ("size", ctypes.c_size_t))


class Gather:
    """Copies spans (target address, source address, bytes), whose targets lie back to back.

    A memmove each would do the same, and does where the kernel offers nothing better or a sandbox forbids it.
    """

    def __init__(self, spans: Sequence[tuple[int, int, int]]) -> None:
        self._spans = spans
        self._sources = (_Vector * len(spans))(*[_Vector(source, size) for _, source, size in spans])
        self._size = sum(size for _, _, size in spans)
        self._target = _Vector(spans[0][0], self._size)

    def run(self) -> None:
        target = ctypes.byref(self._target)
        if _write is None or _write(os.getpid(), self._sources, len(self._spans), target, 1, 0) != self._size:
            for target_address, source, size in self._spans:
                ctypes.memmove(target_address, source, size)


def populate(address: int, size_bytes: int) -> None:
    """Have memory that was never touched brought in, unchanged; a kernel that cannot will do so page by page."""
    if _advise is not None:
        start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        if (whole := (address + size_bytes - start) // mmap.PAGESIZE * mmap.PAGESIZE) > 0:
            _advise(start, whole, MADV_POPULATE_WRITE)


_libc = ctypes.CDLL(None)
_write = getattr(_libc, "process_vm_writev", None)
if _write is not None:
    _write.argtypes = [ctypes.c_int, *[ctypes.c_void_p, ctypes.c_ulong] * 2, ctypes.c_ulong]
    _write.restype = ctypes.c_ssize_t
_advise = _libc.madvise if sys.platform == "linux" else None
if _advise is not None:
    _advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
