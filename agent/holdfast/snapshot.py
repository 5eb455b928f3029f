"""Phase 1: a consistent copy of the state of one instant, made while training goes on.

After iteration i, what forward mutates (buffers, random state, counters) is copied at once. What only an
optimizer's step mutates is copied by a thread while the forward and backward pass of iteration i+1 run; the
step of i+1 waits for it (CheckFreq, FAST'21, figure 4c: the stall is max(0, Tc - (Ti - Tw))).

The copy goes into an arena that is allocated once and laid out as the data section of the payload file.
"""

from __future__ import annotations

import ctypes
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from holdfast.format import Slot, lay_out
from holdfast.protocol import checkpoint_id
from holdfast.state import Captured

logger = logging.getLogger("holdfast")

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.uint16: "U16",
    torch.int32: "I32", torch.uint32: "U32", torch.int64: "I64", torch.uint64: "U64",
    torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
}  # fmt: skip
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
EDGE_BYTES = 64
VIEWED_AS = {torch.complex128: torch.float64}
"""Dtypes that safetensors lacks, and what their elements are stored as."""


class Arena:
    """Host memory for one snapshot: allocated once, kept for the next one."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def reserve(self, size_bytes: int, *, pinned: bool) -> None:
        """Grow to `size_bytes` if need be; pages are touched here, not during the first copy."""
        if self._memory.numel() < size_bytes:
            self._memory = torch.empty(0, dtype=torch.uint8)  # the old one goes before the new one comes
            self._memory = torch.zeros(size_bytes, dtype=torch.uint8, pin_memory=pinned)

    def slot(self, slot: Slot) -> torch.Tensor:
        flat = self._memory[slot.start : slot.end]
        return flat.view(DTYPES[slot.dtype]).view(slot.shape)

    def bytes(self, size_bytes: int) -> memoryview:
        if not size_bytes:
            return memoryview(b"")
        array = (ctypes.c_ubyte * size_bytes).from_address(self._memory.data_ptr())
        return memoryview(array).cast("B")


@dataclass(slots=True)
class Snapshot:
    """A copy under way or complete. `torn` names the tensors that changed while they were copied."""

    iteration: int
    lineage: int
    kind: str
    trees: dict[str, Any]
    slots: list[Slot]
    views: dict[str, str]
    arena: Arena
    started_at: float
    seconds: float = 0.0
    stall_seconds: float = 0.0
    torn: list[str] = field(default_factory=list)
    failure: BaseException | None = None
    copied: threading.Event = field(default_factory=threading.Event)
    outcome: str | None = None
    """durable, torn or failed, once it is settled."""
    reason: str | None = None
    settled: threading.Event = field(default_factory=threading.Event)

    @property
    def id(self) -> str:
        return checkpoint_id(self.iteration, self.lineage)

    @property
    def size_bytes(self) -> int:
        return self.slots[-1].end if self.slots else 0

    def payload(self) -> memoryview:
        return self.arena.bytes(self.size_bytes)


class Snapshotter:
    """Takes snapshots into one arena at a time; the thread that copies lives as long as the session."""

    def __init__(self) -> None:
        self._arena = Arena()
        self._free = threading.Event()
        self._free.set()
        self._current: Snapshot | None = None
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def free(self) -> bool:
        """No snapshot holds the arena: the one before is durable, or given up."""
        return self._free.is_set()

    @property
    def copying(self) -> bool:
        return self._current is not None and not self._current.copied.is_set()

    def wait_free(self, timeout_seconds: float) -> bool:
        return self._free.wait(timeout_seconds)

    def prepare(self, captured: Captured) -> None:
        """Allocate what a snapshot of such a state needs, in the background; a failure shows in `begin`."""
        tensors, _ = _storable(captured.tensors)
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        pinned = any(tensor.is_cuda for tensor in tensors.values())

        def reserve() -> None:
            try:
                self._arena.reserve(size, pinned=pinned)
            except RuntimeError as error:
                logger.debug("no memory for an arena of %d bytes yet: %s", size, error)
            finally:
                self._free.set()

        self._free.clear()
        self._submit(reserve)

    def begin(
        self, captured: Captured, *, iteration: int, lineage: int, kind: str, at_once: bool = False
    ) -> Snapshot:
        """Start copying; returns when everything that forward may change is copied.

        With `at_once` everything is copied before it returns. MemoryError when there is no room for an arena.
        """
        assert self.free, "the arena still holds the snapshot before"
        started = time.perf_counter()
        tensors, views = _storable(captured.tensors)
        slots = lay_out((n, DTYPE_NAMES[t.dtype], tuple(t.shape)) for n, t in tensors.items())
        pinned = any(t.is_cuda for t in tensors.values())
        try:
            self._arena.reserve(slots[-1].end if slots else 0, pinned=pinned)
        except RuntimeError as error:  # torch's word for "out of memory"
            raise MemoryError(str(error).splitlines()[0]) from error
        snapshot = Snapshot(
            iteration, lineage, kind, captured.trees, slots, views, self._arena, started_at=time.time()
        )
        self._free.clear()
        try:
            later = set() if at_once else captured.deferred
            for slot in slots:
                if slot.name not in later:
                    _copy(self._arena.slot(slot), tensors[slot.name])
            rest = [_Deferred(slot, tensors[slot.name]) for slot in slots if slot.name in later]
            self._submit(lambda: self._copy_rest(snapshot, rest, started))
        except BaseException:
            self._free.set()  # or no checkpoint would ever be taken again
            raise
        self._current = snapshot
        if at_once:
            snapshot.copied.wait()
        return snapshot

    def wait_copied(self) -> float:
        """Hold the caller (an optimizer about to step) until the copy is complete; the seconds that took."""
        snapshot = self._current
        if snapshot is None or snapshot.copied.is_set():
            return 0.0
        started = time.perf_counter()
        snapshot.copied.wait()
        waited = time.perf_counter() - started
        snapshot.stall_seconds += waited
        return waited

    def release(self) -> None:
        """The snapshot is persisted or given up: its memory may be used again."""
        self._free.set()

    def close(self) -> None:
        if self._thread is not None:
            self._work.put(None)
            self._thread.join(timeout=60)

    def _submit(self, work: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="holdfast-snapshot", daemon=True)
            self._thread.start()
        self._work.put(work)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()

    def _copy_rest(self, snapshot: Snapshot, rest: list[_Deferred], started: float) -> None:
        try:
            for each in rest:
                _copy(snapshot.arena.slot(each.slot), each.tensor)
            snapshot.torn = [e.slot.name for e in rest if e.changed(snapshot.arena.slot(e.slot))]
        except Exception as error:  # a thread's edge: whatever went wrong, the step that waits must go on
            snapshot.failure = error
        finally:
            snapshot.seconds = time.perf_counter() - started
            snapshot.copied.set()


class _Deferred:
    """A tensor to be copied later, with what tells whether somebody else changed it meanwhile.

    The version counter sees every in-place operation, but not those through `.data`, nor on memory shared
    with NumPy. So the first and last bytes are remembered, too: weights that are swapped or scaled as a
    whole show there. A change of a few elements in the middle through `.data` would go unseen.
    """

    def __init__(self, slot: Slot, tensor: torch.Tensor) -> None:
        self.slot, self.tensor = slot, tensor
        self._version = tensor._version
        self._edges = _edges(tensor)

    def changed(self, copied: torch.Tensor) -> bool:
        return self.tensor._version != self._version or (self._edges is not None and _edges(copied) != self._edges)


def _edges(tensor: torch.Tensor) -> tuple[bytes, bytes] | None:
    if not _is_plain(tensor) or not tensor.numel():
        return None
    start, size = tensor.data_ptr(), tensor.numel() * tensor.element_size()
    edge = min(EDGE_BYTES, size)
    return ctypes.string_at(start, edge), ctypes.string_at(start + size - edge, edge)


def _storable(tensors: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors as safetensors can name them, and which to view as something else when they come back."""
    found, views = {}, {}
    for name, tensor in tensors.items():
        if (stored_as := VIEWED_AS.get(tensor.dtype)) is not None:
            views[name] = str(tensor.dtype).removeprefix("torch.")
            tensor = torch.view_as_real(tensor.resolve_conj()).view(stored_as)
        elif tensor.dtype not in DTYPE_NAMES:
            raise TypeError(f"{name}: tensors of {tensor.dtype} cannot be stored")
        found[name] = tensor
    return found, views


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether its elements lie in host memory one behind the other, as they are."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    if _is_plain(source):
        # One memmove without the interpreter lock, on this thread alone: copy_ would call up a second team of
        # compute threads, which fights with the one that runs forward.
        if target.numel():
            ctypes.memmove(target.data_ptr(), source.data_ptr(), target.numel() * target.element_size())
    else:
        target.copy_(source)
