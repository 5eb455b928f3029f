"""Host memory for snapshots: allocated once, page-aligned, and shareable with a process that outlives this one."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys

import torch

GRAIN_BYTES = 2 << 20
"""Arenas grow in steps of this: a state that gains a few bytes needs no new one."""


class Arena:
    """Memory for one snapshot.

    It is a memory file (memfd) rather than the allocator's: another process can map it, a forked child shares
    it without copy-on-write, and it begins on a page, as direct I/O wants.
    """

    def __init__(self) -> None:
        self.fd = -1
        """-1 on platforms without memory files: only this process has the memory then."""
        self.size_bytes = 0
        self.generation = 0
        """Changes when the memory is replaced: who has mapped it must map it anew."""
        self._map: mmap.mmap | None = None
        self._memory: memoryview = memoryview(b"")
        self.address = 0
        self.pinned = False

    def reserve(self, size_bytes: int, *, pinned: bool = False) -> None:
        """Grow to `size_bytes` if need be; pages are touched here, not during the first copy.

        Raises:
            MemoryError: there is no room for it; nothing is held then.
        """
        if self.size_bytes < size_bytes:
            self.close()  # the old memory goes before the new comes
            self._allocate(-(-size_bytes // GRAIN_BYTES) * GRAIN_BYTES)
        if pinned and not self.pinned and self.size_bytes:
            self._pin()

    def bytes(self, size_bytes: int) -> memoryview:
        return self._memory[:size_bytes]

    def tensor(self, start: int, end: int) -> torch.Tensor:
        """The bytes from `start` to `end`, as a tensor that shares the memory."""
        if start == end:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._memory, dtype=torch.uint8, count=end - start, offset=start)

    def close(self) -> None:
        """Let go of the memory. Whoever still holds a view of it keeps it alive until then."""
        if self.pinned:
            torch.cuda.cudart().cudaHostUnregister(self.address)  # type: ignore[no-untyped-call]
            self.pinned = False
        if self.fd >= 0:
            os.close(self.fd)
        self.fd, self.size_bytes, self.address = -1, 0, 0
        self._memory, self._map = memoryview(b""), None  # unmapped with its last view

    def _allocate(self, size_bytes: int) -> None:
        try:
            if sys.platform == "linux":
                self.fd = os.memfd_create("holdfast-arena", os.MFD_CLOEXEC)
                # reserves the pages: a full memory shows here as an error, not later as a bus error
                os.posix_fallocate(self.fd, 0, size_bytes)
            self._map = mmap.mmap(self.fd, size_bytes)
        except OSError as error:
            self.close()
            size = f"{size_bytes / 1e6:,.0f} MB"
            raise MemoryError(f"no memory for a snapshot of {size}: {error.strerror}") from error
        self._memory, self.size_bytes = memoryview(self._map), size_bytes
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        ctypes.memset(self.address, 0, size_bytes)  # without the interpreter lock
        self.generation += 1

    def _pin(self) -> None:
        """Let a device copy into it at full speed; plain memory does as well, only slower."""
        error = torch.cuda.cudart().cudaHostRegister(self.address, self.size_bytes, 0)  # type: ignore[no-untyped-call]
        self.pinned = int(error) == 0
