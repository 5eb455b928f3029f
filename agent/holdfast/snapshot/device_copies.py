"""Copies from CUDA devices: on streams of their own, beside the next forward and backward pass.

Nothing here waits for a whole device. The optimizer's step is held back by an event on its own stream, so the
thread that trains does not wait at all; the thread that copies waits for the copy alone.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Mapping, Sequence

import torch

from holdfast.pacing.profile import SnapshotMode
from holdfast.snapshot.copying import Pair
from holdfast.torch_internals import version_of

Tensors = Mapping[str, torch.Tensor]
Copy = tuple[torch.Tensor, torch.Tensor]
"""(to host memory, from a device)"""
logger = logging.getLogger("holdfast")

RESERVE = 0.1
"""Of a device's memory; so much stays free beside the peak of training when a snapshot is kept on the device."""


class DeviceCopies:
    """All tensors of one snapshot that live on one CUDA device."""

    def __init__(self, device: torch.device, at_once: Sequence[str], deferred: Sequence[Pair]) -> None:
        self._device, self._at_once, self._deferred = device, at_once, deferred
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()
        self._versions: list[int] | None = None
        self._torn: list[str] = []
        self.mode: SnapshotMode = "cpu"
        self.device_copy_seconds: float | None = None
        """Tg, of the last copy within the device's memory."""
        self._own_bytes, self._peak_before = 0, 0
        """Of our copies on the device, and the peak of training before there were any: they count as its peak."""

    @property
    def memory(self) -> tuple[int, int]:
        """(M, Mmax) in bytes: the most that training has used of the device so far, and all that it has."""
        used, total = memory(self._device)
        return max(self._peak_before, used - self._own_bytes), total

    def start(self, targets: Tensors, tensors: Tensors, mode: SnapshotMode) -> None:
        """Queue, on the stream that trains, all that must be of this very instant."""
        with torch.cuda.device(self._device):
            self._began = _event(enable_timing=True)
            self._began.record()
            self._sources = self._copied_at_once(
                [(targets[name], tensors[name].detach()) for name in self._at_once]
            )
            self.mode = mode if mode == "gpu" and self._clone_deferred() else "cpu"
            if self.mode == "cpu":
                self._sources += [(pair.target, pair.source) for pair in self._deferred]
            # blocking: whoever waits for it sleeps instead of keeping a core busy
            self._ready = _event(enable_timing=True)
            self._ready.record()
            self._done = _event(blocking=True)
        self._versions, self._torn = [version_of(pair.source) for pair in self._deferred], []

    def queue(self) -> None:
        """Queue the copies to host memory; they begin when the stream that trains is past `start`."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_event(self._ready)
            for target, source in self._sources:
                target.copy_(source, non_blocking=True)
                source.record_stream(self._stream)
            self._done.record(self._stream)

    def hold_update(self) -> None:
        """Let an update that is queued next run after the copy; on the device a copy of its own needs no care."""
        self._look()
        if self.mode == "cpu":
            torch.cuda.current_stream(self._device).wait_event(self._done)

    def finish(self) -> list[str]:
        """Wait until all is in host memory; names of the tensors that somebody changed meanwhile."""
        self._done.synchronize()
        self._look()
        if self.mode == "gpu":
            self.device_copy_seconds = self._began.elapsed_time(self._ready) / 1000
        self._sources = []  # the copies on the device go now
        return self._torn

    def quiesce(self) -> None:
        with contextlib.suppress(RuntimeError):  # a device that has failed writes nothing more either
            self._stream.synchronize()
        self._sources = []

    def _look(self) -> None:
        """Compare version counters, once: before the update that changes them by right."""
        with self._lock:
            if self._versions is not None and self.mode == "cpu":
                pairs = zip(self._deferred, self._versions, strict=True)
                self._torn = [pair.slot.name for pair, version in pairs if version_of(pair.source) != version]
            self._versions = None

    def _copied_at_once(self, pairs: Sequence[Copy]) -> list[Copy]:
        """Copies within the device's memory; where that is short the host's, for which training waits."""
        if has_room(sum(source.numel() * source.element_size() for _, source in pairs), *self.memory):
            return [(target, source.clone()) for target, source in pairs]
        for target, source in pairs:
            target.copy_(source)
        return []

    def _clone_deferred(self) -> bool:
        """Copy within the device's memory; False when that would come near to what training needs."""
        needed = sum(pair.source.numel() * pair.source.element_size() for pair in self._deferred)
        if not has_room(needed, *self.memory):
            return False
        if not self._own_bytes:
            self._peak_before = self.memory[0]
        try:
            clones = [(pair.target, pair.source.detach().clone()) for pair in self._deferred]
        except torch.cuda.OutOfMemoryError:
            logger.info("no room on %s for a snapshot of %.0f MB", self._device, needed / 1e6)
            return False
        self._sources += clones
        self._own_bytes = needed
        return True


def has_room(needed_bytes: int, used_bytes: int, total_bytes: int) -> bool:
    """Whether a snapshot fits beside the peak of training with something to spare.

    The one who runs out of memory must never be the user's forward pass, so it is not enough that it fits now.
    """
    return used_bytes + needed_bytes <= total_bytes * (1 - RESERVE)


def memory(device: torch.device) -> tuple[int, int]:
    """(peak of this process and what others hold, all there is) of a device's memory, in bytes."""
    free, total = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_reserved(device)
    return total - free - held + torch.cuda.max_memory_allocated(device), total


def _event(**options: bool) -> torch.cuda.Event:
    return torch.cuda.Event(**options)  # type: ignore[no-untyped-call]
