"""Host memory for snapshots, allocated once and page-aligned for direct I/O."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from holdfast import cuda
from holdfast.system.host_memory import populate
from holdfast.torch_internals import never_compiled

if TYPE_CHECKING:
    from holdfast.save.shared_buffers import SharedBuffer

logger = logging.getLogger("holdfast")

GRAIN_BYTES = 2 << 20
"""Allocation granularity: a state that grows by a few bytes needs no new arena."""
MADV_WIPEONFORK = 18
ADVICE = [mmap.MADV_HUGEPAGE, MADV_WIPEONFORK] if hasattr(mmap, "MADV_HUGEPAGE") else []
"""Advice for private arenas. Forked children get empty pages: otherwise loader workers would keep a copy of each
page that a later snapshot overwrites. Not MADV_DONTFORK: a child that frees the arena would unmap what it has
mapped there since."""


class PinnableMemory(mmap.mmap):
    """Memory that may be registered with CUDA.

    The registration ends just before the memory is unmapped, after the last view of it is gone. Otherwise
    CUDA would copy to the old pages of an address that is mapped again.
    """

    address = 0
    registered_by = 0
    """Id of the process that registered it; 0 where it is not registered. A forked process has no registration."""

    def register(self) -> None:
        """Pin it for fast copies from devices, which are slower without."""
        if self.registered_by:
            return
        reason = cuda.register(self.address, len(self))
        if reason is None:
            self.registered_by = os.getpid()
            return
        logger.warning(
            "%.0f MB of host memory cannot be pinned, so copies are slower: %s", len(self) / 1e6, reason
        )

    @never_compiled
    def __del__(self) -> None:
        if self.registered_by == os.getpid():
            with contextlib.suppress(Exception):  # at the exit of the interpreter CUDA may be gone
                cuda.unregister(self.address)


class Arena:
    """Memory for one snapshot.

    The memory of a slot is a memory file (memfd), which another process can map, usually in small pages. Private
    memory uses huge pages: a direct write of it needs fewer requests to the device, and was measured to take half
    the time.

    Args:
        slot: supervisor memory to use, which outlives this process.
        on_fallback: called once, with the reason, when the slot cannot be used and private memory is.
    """

    def __init__(
        self, slot: SharedBuffer | None = None, on_fallback: Callable[[str], None] = lambda _: None
    ) -> None:
        self.slot, self._on_fallback = slot, on_fallback
        self.fd = -1
        """Descriptor of the memory file; -1 for private memory."""
        self.size_bytes = 0
        self._map: PinnableMemory | None = None
        self._memory: memoryview = memoryview(b"")
        self.address = 0

    def reserve(self, size_bytes: int, *, pinned: bool = False) -> None:
        """Grow to `size_bytes` if needed; pages are touched here, not during the first copy.

        Raises:
            MemoryError: the memory cannot be allocated; nothing is held then.
        """
        if self.size_bytes < size_bytes:
            self.close()  # free the old memory before allocating
            self._allocate(_in_grains(size_bytes))
        if pinned and self._map is not None:
            self._map.register()

    @property
    def marker(self) -> Path | None:
        """Path of the completion marker, for readers after this process is gone."""
        return self.slot.marker if self.slot is not None else None

    def remove_marker(self) -> None:
        """Remove the completion marker before the content changes. OSError: then it must not change."""
        if self.slot is not None:
            self.slot.remove_marker()

    def adopt(self, size_bytes: int) -> None:
        """Map its slot with the snapshot of an earlier process. OSError when it cannot be mapped."""
        assert self.slot is not None
        self.close()
        self.fd = self.slot.open()
        self._hold(self._mapped(_in_grains(size_bytes)))

    def free_pages(self) -> None:
        """Free the pages of an unneeded snapshot; views show zeros from then on."""
        if self.slot is not None and self._map is not None and hasattr(mmap, "MADV_REMOVE"):
            with contextlib.suppress(OSError):
                self._map.madvise(mmap.MADV_REMOVE)

    def bytes(self, size_bytes: int) -> memoryview:
        return self._memory[:size_bytes]

    def tensor(self, start: int, end: int) -> torch.Tensor:
        """Return the bytes from `start` to `end` as a tensor that shares the memory."""
        if start == end:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._memory, dtype=torch.uint8, count=end - start, offset=start)

    def close(self) -> None:
        """Release the memory; existing views keep it alive."""
        if self.fd >= 0:
            os.close(self.fd)
        self.fd, self.size_bytes, self.address = -1, 0, 0
        self._memory, self._map = memoryview(b""), None  # unmapped with its last view

    def _allocate(self, size_bytes: int) -> None:
        if self.slot is not None and self._allocated_in(self.slot, size_bytes):
            return
        try:
            self._hold(_private_memory(size_bytes))
        except OSError as error:
            size = f"{size_bytes / 1e6:,.0f} MB"
            raise MemoryError(f"no memory for a snapshot of {size}: {error.strerror}") from error
        ctypes.memset(self.address, 0, size_bytes)  # without the interpreter lock

    def _allocated_in(self, slot: SharedBuffer, size_bytes: int) -> bool:
        """Try to allocate in the slot, keeping its content; return whether it worked."""
        try:
            self.fd = slot.open()
            self._hold(self._mapped(size_bytes))
        except OSError as error:
            self.close()
            self.slot = None
            free_slot_pages(slot)
            self._on_fallback(f"{size_bytes / 1e6:,.0f} MB: {error.strerror or error}")
            return False
        populate(self.address, size_bytes)
        return True

    def _hold(self, memory: PinnableMemory) -> None:
        self._map, self._memory, self.size_bytes = memory, memoryview(memory), len(memory)
        self.address = memory.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))

    def _mapped(self, size_bytes: int) -> PinnableMemory:
        # reserve the pages: a lack of memory is an error here, not a bus error later
        os.posix_fallocate(self.fd, 0, size_bytes)
        return PinnableMemory(self.fd, size_bytes)


def _in_grains(size_bytes: int) -> int:
    return max(1, -(-size_bytes // GRAIN_BYTES)) * GRAIN_BYTES


def free_slot_pages(slot: SharedBuffer) -> None:
    """Free the pages of a slot, unless it holds a complete snapshot, maybe the only copy."""
    if slot.marker.exists() or not hasattr(mmap, "MADV_REMOVE"):
        return
    with contextlib.suppress(OSError):
        fd = slot.open()
        try:
            if size_bytes := os.fstat(fd).st_size:
                with mmap.mmap(fd, size_bytes) as memory:
                    memory.madvise(mmap.MADV_REMOVE)
        finally:
            os.close(fd)


def _private_memory(size_bytes: int) -> PinnableMemory:
    memory = PinnableMemory(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in ADVICE:
        with contextlib.suppress(OSError):  # unsupported by the kernel: slower, but correct
            memory.madvise(advice)
    return memory
