"""Copies and other operations on the memory of this process, in few calls and without the interpreter lock."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import mmap
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.system import io_pool

if TYPE_CHECKING:
    import torch

MAX_SPANS = 1024
"""Maximum number of spans per system call (IOV_MAX)."""
MADV_POPULATE_WRITE = 23
_GROUPS = {
    "": ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    "memory": ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""By the controllers of a line in /proc/self/cgroup, of versions 2 and 1: folder and files of memory limits."""


def fresh_memory(size_bytes: int) -> mmap.mmap:
    """Map zeroed private memory. MemoryError when it cannot be allocated.

    Huge pages are not requested. They usually take less time, but not on a virtual machine that returns free
    memory to its host: it returns huge pages first, and there each read took twice as long.
    """
    try:
        return mmap.mmap(-1, max(1, size_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no memory for {size_bytes / 1e6:,.0f} MB of a checkpoint: {error.strerror}") from error


class ThreadMemory(threading.local):
    """Memory of each thread to read into: to fault in new memory takes several times as long as to read."""

    def __init__(self) -> None:
        self._memory = memoryview(b"")

    def of_thread(self, size_bytes: int) -> memoryview:
        if len(self._memory) < size_bytes:
            self._memory = memoryview(fresh_memory(size_bytes))
        return self._memory[:size_bytes]


def available_bytes() -> int:
    """Return the memory that new processes of this host, or of this container, can use without swapping."""
    import psutil  # on demand: the supervisor needs little memory

    available: int = psutil.virtual_memory().available
    return min([available, *_left_in_groups()])


def _left_in_groups() -> Iterator[int]:
    """Yield what the memory limits of this process's control group, and of those above it, leave."""
    for line in _text("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        top, limit, used, cache = _GROUPS.get(controllers, ("", "", "", ""))
        group = Path(top + path)
        while top and group.is_relative_to(top):
            with contextlib.suppress(ValueError):  # no limit
                fields = dict(each.split() for each in _text(group / "memory.stat").splitlines())
                reclaimable = int(fields.get(cache, 0))
                yield max(0, int(_text(group / limit)) - int(_text(group / used)) + reclaimable)
            group = group.parent


def _text(path: str | Path) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


@functools.cache
def can_share() -> bool:
    """Return whether memory files (memfd), which another process can map, are supported and permitted."""
    try:
        os.close(os.memfd_create("holdfast-try"))
    except (AttributeError, OSError):
        return False
    return True


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the elements are contiguous in host memory, without a lazy conjugate or negative bit."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def bytes_of(tensor: torch.Tensor) -> memoryview:
    array = (ctypes.c_ubyte * (tensor.numel() * tensor.element_size())).from_address(tensor.data_ptr())
    return memoryview(array).cast("B")


class _Vector(ctypes.Structure):
    """struct iovec"""

    _fields_ = (("address", ctypes.c_void_p), ("size", ctypes.c_size_t))


class Gather:
    """Copies spans (target address, source address, bytes) with adjacent targets in one system call.

    Falls back to one memmove per span where process_vm_writev is missing or forbidden.
    """

    def __init__(self, spans: Sequence[tuple[int, int, int]]) -> None:
        self._spans = spans
        self._sources = (_Vector * len(spans))(*[_Vector(source, size) for _, source, size in spans])
        self._size = sum(size for _, _, size in spans)
        self._target = _Vector(spans[0][0], self._size)

    def run(self) -> None:
        if _process_vm_writev(self._sources, self._target) != self._size:
            for target_address, source, size in self._spans:
                ctypes.memmove(target_address, source, size)


class SafeMemoryReader:
    """Reads spans (address, bytes) of memory that may have been unmapped.

    Touching unmapped memory kills the process, while process_vm_writev returns an error. Where that call is not
    available (see `can_read_safely`), the caller must know that the memory is mapped.
    """

    def __init__(self, spans: Sequence[tuple[int, int]]) -> None:
        self._spans = spans
        self._found = (ctypes.c_ubyte * sum(size for _, size in spans))()
        self._runs: list[tuple[ctypes.Array[_Vector], _Vector]] = []
        at = ctypes.addressof(self._found)
        for start in range(0, len(spans), MAX_SPANS):
            run = spans[start : start + MAX_SPANS]
            target = _Vector(at, sum(size for _, size in run))
            self._runs.append(((_Vector * len(run))(*[_Vector(*span) for span in run]), target))
            at += target.size

    def read(self) -> bytes | None:
        """Return the concatenated bytes; None if a span is unmapped."""
        if not can_read_safely():
            return b"".join(ctypes.string_at(*span) for span in self._spans)
        for sources, target in self._runs:
            if _process_vm_writev(sources, target) != target.size:
                return None
        return bytes(self._found)


@functools.cache
def can_read_safely() -> bool:
    """Return whether process_vm_writev works on this process."""
    one, other = ctypes.c_ubyte(7), ctypes.c_ubyte(0)
    source = (_Vector * 1)(_Vector(ctypes.addressof(one), 1))
    return _process_vm_writev(source, _Vector(ctypes.addressof(other), 1)) == 1 and other.value == 7


def _process_vm_writev(sources: ctypes.Array[_Vector], target: _Vector) -> int:
    return -1 if _write is None else int(_write(os.getpid(), sources, len(sources), ctypes.byref(target), 1, 0))


COPY_CHUNK_BYTES = 8 << 20
"""Size of the piece that a thread copies at a time."""
ALIGNED_BYTES = 64
"""A cache line, to which the allocator of torch aligns tensors."""


def copies_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy plain tensors into one block of new memory, on several threads, since most of the time is page faults.

    `Tensor.clone` would synchronize torch's threads at each tensor, which is slow when other cores are busy.
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
        (target.data_ptr() + at, source.data_ptr() + at, min(COPY_CHUNK_BYTES, source.nbytes - at))
        for target, source in pairs
        for at in range(0, source.nbytes, COPY_CHUNK_BYTES)
    )

    def copy() -> None:
        while spans:
            with contextlib.suppress(IndexError):  # another thread took the last one
                ctypes.memmove(*spans.popleft())

    io_pool.share(copy, len(os.sched_getaffinity(0)))


def populate(address: int, size_bytes: int) -> None:
    """Fault in the pages of untouched memory in one call; does nothing where the kernel does not support it."""
    if _advise is not None:
        start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        if (length := (address + size_bytes - start) // mmap.PAGESIZE * mmap.PAGESIZE) > 0:
            _advise(start, length, MADV_POPULATE_WRITE)


_libc = ctypes.CDLL(None)
_write = getattr(_libc, "process_vm_writev", None)
if _write is not None:
    _write.argtypes = [ctypes.c_int, *[ctypes.c_void_p, ctypes.c_ulong] * 2, ctypes.c_ulong]
    _write.restype = ctypes.c_ssize_t
_advise = _libc.madvise if sys.platform == "linux" else None
if _advise is not None:
    _advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


SINGLE_THREAD_BYTES = 1 << 30
"""A module of at most this size is loaded on one thread, which takes about 0.1 s."""


@contextlib.contextmanager
def one_thread_for(size_bytes: int) -> Iterator[None]:
    """Limit torch to one thread for small copies: when other cores are busy, synchronizing its threads at each
    tensor takes longer than the copy."""
    import torch  # not at module level: the rescue of a killed trainer does not import torch

    threads = torch.get_num_threads()
    if threads == 1 or size_bytes > SINGLE_THREAD_BYTES:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
