"""Copies from CUDA devices, on a separate stream, while the next forward and backward pass run.

Nothing here synchronizes a device. The training stream waits for an event before the optimizer step, so the
training thread does not block; the copying thread waits for the event that follows the copy.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Mapping, Sequence

import torch

from holdfast.pacing.profile import SnapshotMode
from holdfast.snapshot.copying import Pair
from holdfast.torch_internals import copy_all, version_of

Tensors = Mapping[str, torch.Tensor]
Copy = tuple[torch.Tensor, torch.Tensor]
"""(target in host memory, source on a device)"""
logger = logging.getLogger("holdfast")

RESERVE = 0.1
"""Fraction of device memory that stays free above the peak of training and a snapshot on the device."""


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
        """Size of the copies on the device, and the peak of training before the first: torch counts them in it."""

    @property
    def memory(self) -> tuple[int, int]:
        """(M, Mmax) in bytes: peak use of the device by training so far, and its total memory."""
        used, total = memory(self._device)
        return max(self._peak_before, used - self._own_bytes), total

    def start(self, targets: Tensors, tensors: Tensors, mode: SnapshotMode) -> None:
        """Queue the copies on the training stream that must precede the next forward pass."""
        with torch.cuda.device(self._device):
            self._began = _event(enable_timing=True)
            self._began.record()
            self._sources = self._clone_at_once(
                [(targets[name], tensors[name].detach()) for name in self._at_once]
            )
            self.mode = mode if mode == "gpu" and self._clone_deferred() else "cpu"
            if self.mode == "cpu":
                self._sources += [(pair.target, pair.source) for pair in self._deferred]
            self._ready = _event(enable_timing=True)
            self._ready.record()
            self._done = _event(blocking=True)  # the copying thread sleeps instead of spinning
        self._recorded = [version_of(pair.source) for pair in self._deferred]
        self._versions, self._torn = self._recorded, []

    @property
    def versions(self) -> dict[str, int]:
        """Version counters of the deferred tensors at `start`, by name."""
        return dict(zip((pair.slot.name for pair in self._deferred), self._recorded, strict=True))

    def queue(self) -> None:
        """Queue the copies to host memory; they begin when the training stream has passed `start`."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_event(self._ready)
            copy_all([target for target, _ in self._sources], [source for _, source in self._sources])
            self._done.record(self._stream)

    def hold_update(self) -> None:
        """Make the training stream wait for the copy; not needed in mode "gpu", which copies a clone."""
        self._compare_versions()
        if self.mode == "cpu":
            torch.cuda.current_stream(self._device).wait_event(self._done)

    def finish(self) -> list[str]:
        """Wait until all copies are in host memory; return the names of tensors that changed meanwhile."""
        self._done.synchronize()
        self._compare_versions()
        if self.mode == "gpu":
            self.device_copy_seconds = self._began.elapsed_time(self._ready) / 1000
        self._sources = []  # frees the clones on the device, which no stream uses any more
        return self._torn

    def quiesce(self) -> None:
        """Wait until the device no longer writes to host memory."""
        with contextlib.suppress(RuntimeError):  # a failed device writes nothing
            self._stream.synchronize()
        self._sources = []

    def _compare_versions(self) -> None:
        """Compare version counters once, before the optimizer step increments them."""
        with self._lock:
            if self._versions is not None and self.mode == "cpu":
                pairs = zip(self._deferred, self._versions, strict=True)
                self._torn = [pair.slot.name for pair, version in pairs if version_of(pair.source) != version]
            self._versions = None

    def _clone_at_once(self, pairs: Sequence[Copy]) -> list[Copy]:
        """Clone on the device; without room there, copy to host memory while training waits."""
        if has_room(sum(source.numel() * source.element_size() for _, source in pairs), *self.memory):
            return [(target, source.clone()) for target, source in pairs]
        for target, source in pairs:
            target.copy_(source)
        return []

    def _clone_deferred(self) -> bool:
        """Clone on the device; return False if there is not enough free memory."""
        needed = sum(pair.source.numel() * pair.source.element_size() for pair in self._deferred)
        if not has_room(needed, *self.memory):
            return False
        if not self._own_bytes:
            self._peak_before = self.memory[0]
        try:
            clones = [torch.empty_like(pair.source) for pair in self._deferred]
        except torch.cuda.OutOfMemoryError:
            logger.info("no room on %s for a snapshot of %.0f MB", self._device, needed / 1e6)
            return False
        copy_all(clones, [pair.source for pair in self._deferred])
        self._sources += [(pair.target, clone) for pair, clone in zip(self._deferred, clones, strict=True)]
        self._own_bytes = needed
        return True


def has_room(needed_bytes: int, used_bytes: int, total_bytes: int) -> bool:
    """Return whether a snapshot fits above the peak of training, with RESERVE to spare.

    Memory that is free now is not enough: a later forward pass must not run out of memory.
    """
    return used_bytes + needed_bytes <= total_bytes * (1 - RESERVE)


def memory(device: torch.device) -> tuple[int, int]:
    """Return (peak of this process plus use by other processes, total) of a device's memory, in bytes."""
    free, total = torch.cuda.mem_get_info(device)
    stats = torch.cuda.memory_stats_as_nested_dict(device)  # `memory_stats` takes ten times as long
    reserved, peak = stats["reserved_bytes"]["all"]["current"], stats["allocated_bytes"]["all"]["peak"]
    return total - free - reserved + peak, total


def _event(**options: bool) -> torch.cuda.Event:
    return torch.cuda.Event(**options)  # type: ignore[no-untyped-call]
