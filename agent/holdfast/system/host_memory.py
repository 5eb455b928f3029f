"""What the kernel does with this process's memory in one call, without the interpreter lock."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import mmap
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from holdfast.system import io_pool

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
        if _written(self._sources, self._target) != self._size:
            for target_address, source, size in self._spans:
                ctypes.memmove(target_address, source, size)


class SafeMemoryReader:
    """Reads spans (address, bytes) that may be anybody's by now.

    Memory that is gone ends a process that touches it; the kernel says that it is gone. Where it may not be asked
    (see `can_peek`) whoever reads has to know that it is there.
    """

    def __init__(self, spans: Sequence[tuple[int, int]]) -> None:
        self._spans = spans
        self._found = (ctypes.c_ubyte * sum(size for _, size in spans))()
        self._runs: list[tuple[ctypes.Array[_Vector], _Vector]] = []
        at = ctypes.addressof(self._found)
        for start in range(0, len(spans), MOST_SPANS):
            run = spans[start : start + MOST_SPANS]
            target = _Vector(at, sum(size for _, size in run))
            self._runs.append(((_Vector * len(run))(*[_Vector(*span) for span in run]), target))
            at += target.size

    def read(self) -> bytes | None:
        """All of them, one behind the other; None where some are gone."""
        if not can_peek():
            return b"".join(ctypes.string_at(*span) for span in self._spans)
        for sources, target in self._runs:
            if _written(sources, target) != target.size:
                return None
        return bytes(self._found)


@functools.cache
def can_peek() -> bool:
    """Whether the kernel copies from this process's memory and says so where there is none."""
    one, other = ctypes.c_ubyte(7), ctypes.c_ubyte(0)
    source = (_Vector * 1)(_Vector(ctypes.addressof(one), 1))
    return _written(source, _Vector(ctypes.addressof(other), 1)) == 1 and other.value == 7


def _written(sources: ctypes.Array[_Vector], target: _Vector) -> int:
    return -1 if _write is None else int(_write(os.getpid(), sources, len(sources), ctypes.byref(target), 1, 0))


COPIED_BYTES = 8 << 20
"""By one thread at a time."""
ALIGNED_BYTES = 64
"""A cache line: what torch's own allocator aligns tensors to."""


def duplicates(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies of plain tensors, side by side in new memory; on several threads, since touching that takes longest.

    torch's own threads wait for each other at each tensor, and where other cores are busy for long.
    """
    import torch

    starts, end = {}, 0
    for name, tensor in tensors.items():
        starts[name] = end
        end = -(-(end + tensor.nbytes) // ALIGNED_BYTES) * ALIGNED_BYTES
    memory = mmap.mmap(-1, max(1, end), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    found = {}
    for name, tensor in tensors.items():
        raw = torch.frombuffer(memory, dtype=torch.uint8, count=tensor.nbytes, offset=starts[name])
        found[name] = raw.view(tensor.dtype).view(tensor.shape)
    copy_plain([(found[name], tensor) for name, tensor in tensors.items()])
    return found


def copy_plain(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy plain tensors (to, from) of equal size on several threads."""
    spans = collections.deque(
        (target.data_ptr() + at, source.data_ptr() + at, min(COPIED_BYTES, source.nbytes - at))
        for target, source in pairs
        for at in range(0, source.nbytes, COPIED_BYTES)
    )

    def copy() -> None:
        while spans:
            with contextlib.suppress(IndexError):  # another thread took the last one
                ctypes.memmove(*spans.popleft())

    io_pool.share(copy, len(os.sched_getaffinity(0)))


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


ALONE_BYTES = 1 << 30
"""A module of at most this is loaded on one thread: a tenth of a second."""


@contextlib.contextmanager
def one_thread_for(size_bytes: int) -> Iterator[None]:
    """Copy little on this thread alone: where other cores are busy, torch's threads wait for each other at each
    tensor, which takes longer than the copy."""
    import torch  # whoever loads a model has it; a process that only writes does without

    threads = torch.get_num_threads()
    if threads == 1 or size_bytes > ALONE_BYTES:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
