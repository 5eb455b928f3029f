"""The layout of a state's tensors in an arena, and the copies that fill it."""

from __future__ import annotations

import contextlib

import torch

from holdfast import accelerators
from holdfast.accelerators import is_accelerator
from holdfast.format.dtypes import PAIRED, stored_as
from holdfast.format.manifest import TensorRange, lay_out
from holdfast.pacing.policy import SnapshotMode
from holdfast.save.copying import DeviceCopies, HostCopies, Pair, TornCopyDetector, UnchangedTensorCache
from holdfast.save.host_buffers import Arena
from holdfast.state.registry import CapturedState
from holdfast.system.host_memory import is_plain


class Layout:
    """An arena and the copies into it, computed once per structure of the state and used for every snapshot."""

    slots: list[TensorRange]
    views: dict[str, str]

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self._structure: object = None
        self._forget()

    def fit(self, captured: CapturedState) -> None:
        """Lay out the arena for a state; does nothing if its structure is that of the previous one.

        Raises:
            MemoryError: the arena cannot be allocated.
            TypeError: the state has a tensor that cannot be stored.
        """
        if self._structure is captured.structure:
            return
        self._structure = None
        self._forget()
        stored = {name: stored_as(name, tensor) for name, tensor in captured.tensors.items()}
        slots = lay_out((name, dtype, shape) for name, (dtype, shape, _) in stored.items())
        devices = [device for device in _accelerators(captured) if device.type == "cuda"]
        # on a device of the state: a new thread would use, and occupy memory of, device 0
        with accelerators.module_of("cuda").device(devices[0]) if devices else contextlib.nullcontext():
            self.arena.reserve(slots[-1].end if slots else 0, pinned=bool(devices))
        self.slots = slots
        self.views = {name: view for name, (_, _, view) in stored.items() if view is not None}
        self._plan(captured)
        self._structure = captured.structure

    def start(self, captured: CapturedState, mode: SnapshotMode, *, digests: bool) -> None:
        """Copy what the forward pass may change, and record versions of the rest to detect changes."""
        self._detector.remember(digests=digests)
        for name in self._at_once:
            self._targets[name].copy_(captured.tensors[name].detach())
        for device in self._devices:
            device.start(self._targets, captured.tensors, mode)

    def copy_host(self) -> list[str]:
        """Copy the rest of the tensors in host memory, and queue the copies from devices.

        Call it before the optimizer step. Returns the names of tensors that changed during the copy.
        """
        for device in self._devices:
            device.queue()
        self._unchanged.run()
        self._host.run()
        for pair in self._not_plain:
            pair.target.copy_(pair.source.detach())
        changed = self._detector.changed()
        if changed:
            self._unchanged.forget()  # its copies may be torn
        return changed

    def borrow(self) -> memoryview:
        """Return all memory of the arena until the next snapshot. OSError if its marker cannot be removed."""
        self.arena.remove_marker()
        self._unchanged.forget()
        return self.arena.bytes(self.arena.size_bytes)

    def hold_update(self) -> None:
        """Make the training streams wait for the copies from devices."""
        for device in self._devices:
            device.hold_update()

    def quiesce(self) -> None:
        """Wait, after a failure, until no device writes to the arena."""
        for device in self._devices:
            device.quiesce()

    def finish(self) -> list[str]:
        """Wait for the copies from devices; return the names of tensors that changed meanwhile."""
        return [name for device in self._devices for name in device.finish()]

    @property
    def device_copy_seconds(self) -> float | None:
        """Tg of the last snapshot; None if it was not first copied on a device."""
        measured = [d.device_copy_seconds for d in self._devices if d.device_copy_seconds is not None]
        return max(measured, default=None)

    @property
    def versions(self) -> dict[str, int]:
        """Version counters of the tensors that only an optimizer step changes, at the start of the last copy."""
        found = self._detector.versions
        for device in self._devices:
            found |= device.versions
        return found

    @property
    def copied_on_device(self) -> bool:
        """The cost of a copy on the device is known, or there is no device."""
        return not self._devices or self.device_copy_seconds is not None

    @property
    def device_memory(self) -> tuple[int, int]:
        """Peak use and total memory, (M, Mmax) in bytes, of the device with the least room; zeros without a
        device.
        """
        found = [device.memory for device in self._devices]
        return min(found, key=lambda each: each[1] - each[0], default=(0, 0))

    def _forget(self) -> None:
        """Drop all views of the arena, so that its memory can be replaced."""
        self.slots, self.views = [], {}
        self._targets: dict[str, torch.Tensor] = {}
        self._at_once: list[str] = []
        self._devices: list[DeviceCopies] = []
        self._not_plain: list[Pair] = []
        self._host, self._unchanged = HostCopies([]), UnchangedTensorCache([])
        self._detector = TornCopyDetector([])

    def _plan(self, captured: CapturedState) -> None:
        pairs = {}
        for slot in self.slots:
            source = captured.tensors[slot.name]
            pairs[slot.name] = Pair(slot, source, self._target(slot, source))
        self._targets = {name: pair.target for name, pair in pairs.items()}
        host = {name: pair for name, pair in pairs.items() if not is_accelerator(pair.source.device)}
        later = {name: pair for name, pair in host.items() if name in captured.deferred}
        self._at_once = [name for name in host if name not in later]
        frozen = {name: pair for name, pair in later.items() if name in captured.frozen and is_plain(pair.source)}
        moving = [pair for name, pair in later.items() if name not in frozen]
        self._unchanged = UnchangedTensorCache(list(frozen.values()))
        self._host = HostCopies([pair for pair in moving if is_plain(pair.source)])
        self._not_plain = [pair for pair in moving if not is_plain(pair.source)]
        self._detector = TornCopyDetector(list(later.values()), captured.optimizer_state)
        self._devices = [self._device_copies(device, pairs, captured) for device in _accelerators(captured)]

    def _device_copies(
        self, device: torch.device, pairs: dict[str, Pair], captured: CapturedState
    ) -> DeviceCopies:
        here = {name: pair for name, pair in pairs.items() if pair.source.device == device}
        deferred = [pair for name, pair in here.items() if name in captured.deferred]
        return DeviceCopies(device, [name for name in here if name not in captured.deferred], deferred)

    def _target(self, slot: TensorRange, source: torch.Tensor) -> torch.Tensor:
        """Return a range of the arena as a tensor with the dtype and shape of `source`."""
        flat = self.arena.tensor(slot.start, slot.end)
        if source.dtype in PAIRED:
            return torch.view_as_complex(flat.view(PAIRED[source.dtype]).view(slot.shape))
        return flat.view(source.dtype).view(source.shape)


def _accelerators(captured: CapturedState) -> list[torch.device]:
    devices = {tensor.device for tensor in captured.tensors.values()}
    return sorted(filter(is_accelerator, devices), key=lambda device: (device.type, device.index or 0))


def estimate_checkpoint_bytes(captured: CapturedState, world_size: int) -> tuple[int, int]:
    """Estimate the size of a checkpoint of all ranks, assuming that each has as much state as this rank.

    The second number is the part that no optimizer trains, which checkpoints may share.
    """
    tensors: dict[str, torch.Tensor] = {}
    for found in reversed(captured.whole.maps):  # a lookup in all of them per tensor takes ten times as long
        tensors.update(found)
    own_bytes = sum(tensors[name].nbytes for name in captured.rank_local if name in tensors)
    frozen_bytes = sum(tensors[name].nbytes for name in captured.frozen if name in tensors)
    return sum(tensor.nbytes for tensor in tensors.values()) + (world_size - 1) * own_bytes, frozen_bytes
