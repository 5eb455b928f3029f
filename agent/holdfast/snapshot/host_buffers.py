"""Host memory for snapshots: allocated once, and page-aligned as direct I/O wants it."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Callable

import torch

from holdfast.snapshot.shared_buffers import SharedBuffer
from holdfast.system.host_memory import can_share, populate

GRAIN_BYTES = 2 << 20
"""Arenas grow in steps of this: a state that gains a few bytes needs no new one."""
MADV_WIPEONFORK = 18
ADVICE = [mmap.MADV_HUGEPAGE, MADV_WIPEONFORK] if hasattr(mmap, "MADV_HUGEPAGE") else []
"""Empty in children: a loader's workers would hold each page that a snapshot overwrites after they were forked.
Not MADV_DONTFORK: what a child maps into such a hole is unmapped when the child drops the arena."""


class Arena:
    """Memory for one snapshot.

    Shared, it is a memory file (memfd), which another process can map. Kernels as a rule give such files small
    pages. Private memory is in huge ones, which a device takes from in a fraction of the requests: measured, a
    direct write of it takes half as long.

    Args:
        slot: where the memory is to lie so that it outlives this process; shared memory then, whatever is asked.
        told: called, once, with the reason when it cannot lie there, and is this process's own after all.
    """

    def __init__(self, slot: SharedBuffer | None = None, told: Callable[[str], None] = lambda _: None) -> None:
        self.slot, self._told = slot, told
        self.fd = -1
        """Of the memory file; -1 where only this process has the memory."""
        self.size_bytes = 0
        self.generation = 0
        """Changes when the memory is replaced: who has mapped it must map it anew."""
        self._map: mmap.mmap | None = None
        self._memory: memoryview = memoryview(b"")
        self.address = 0
        self.pinned = False

    def reserve(self, size_bytes: int, *, shared: bool = True, pinned: bool = False) -> None:
        """Grow to `size_bytes` if need be, of that kind; pages are touched here, not during the first copy.

        Raises:
            MemoryError: there is no room for it; nothing is held then.
        """
        shared = (shared or self.slot is not None) and can_share()
        if self.size_bytes < size_bytes or shared != (self.fd >= 0):
            self.close()  # the old memory goes before the new comes
            self._allocate(_in_grains(size_bytes), shared)
        if pinned and not self.pinned and self.size_bytes:
            self._pin()

    @property
    def seal(self) -> str | None:
        """The file that is to say what is in it, for those who find it when this process is gone."""
        return str(self.slot.seal) if self.slot is not None else None

    def unseal(self) -> None:
        """What is in it is about to change. OSError where that cannot be said: then it must not."""
        if self.slot is not None:
            self.slot.unseal()

    def adopt(self, size_bytes: int) -> None:
        """Take its slot as it is, with what a process before this one left there. OSError when it cannot."""
        assert self.slot is not None
        self.close()
        self.fd = self.slot.open()
        self._hold(self._mapped(_in_grains(size_bytes)))

    def forget(self) -> None:
        """Give the pages back: nobody has any use for what was in it. A view of them shows zeros from then on."""
        if self.slot is not None and self._map is not None and hasattr(mmap, "MADV_REMOVE"):
            with contextlib.suppress(OSError):
                self._map.madvise(mmap.MADV_REMOVE)

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

    def _allocate(self, size_bytes: int, shared: bool) -> None:
        if self.slot is not None and self._allocated_in(self.slot, size_bytes):
            return
        try:
            if shared:
                self.fd = os.memfd_create("holdfast-arena", os.MFD_CLOEXEC)
            self._hold(self._mapped(size_bytes) if shared else _private_memory(size_bytes))
        except OSError as error:
            self.close()
            size = f"{size_bytes / 1e6:,.0f} MB"
            raise MemoryError(f"no memory for a snapshot of {size}: {error.strerror}") from error
        ctypes.memset(self.address, 0, size_bytes)  # without the interpreter lock

    def _allocated_in(self, slot: SharedBuffer, size_bytes: int) -> bool:
        """Whether there is room for it there. What it holds stays as it is."""
        try:
            self.fd = slot.open()
            self._hold(self._mapped(size_bytes))
        except OSError as error:
            self.close()
            self.slot = None
            punch(slot)
            self._told(f"{size_bytes / 1e6:,.0f} MB: {error.strerror or error}")
            return False
        populate(self.address, size_bytes)
        return True

    def _hold(self, memory: mmap.mmap) -> None:
        self._map, self._memory, self.size_bytes = memory, memoryview(memory), len(memory)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.generation += 1

    def _mapped(self, size_bytes: int) -> mmap.mmap:
        # reserves the pages: a full memory shows here as an error, not later as a bus error
        os.posix_fallocate(self.fd, 0, size_bytes)
        return mmap.mmap(self.fd, size_bytes)

    def _pin(self) -> None:
        """Let a device copy into it at full speed; plain memory does as well, only slower."""
        error = torch.cuda.cudart().cudaHostRegister(self.address, self.size_bytes, 0)  # type: ignore[no-untyped-call]
        self.pinned = int(error) == 0


def _in_grains(size_bytes: int) -> int:
    return max(1, -(-size_bytes // GRAIN_BYTES)) * GRAIN_BYTES


def punch(slot: SharedBuffer) -> None:
    """Give back the pages of a slot that is of no use any more; not those of a snapshot, maybe the only copy."""
    if slot.seal.exists() or not hasattr(mmap, "MADV_REMOVE"):
        return
    with contextlib.suppress(OSError):
        fd = slot.open()
        try:
            if size_bytes := os.fstat(fd).st_size:
                with mmap.mmap(fd, size_bytes) as memory:
                    memory.madvise(mmap.MADV_REMOVE)
        finally:
            os.close(fd)


def _private_memory(size_bytes: int) -> mmap.mmap:
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in ADVICE:
        with contextlib.suppress(OSError):  # a kernel without it: the memory is as good, only slower
            memory.madvise(advice)
    return memory
