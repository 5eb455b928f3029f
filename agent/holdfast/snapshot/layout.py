"""Where each tensor of a state lies in an arena, and how it gets there."""

from __future__ import annotations

import torch

from holdfast.format.dtypes import PAIRED, stored_as
from holdfast.format.manifest import TensorRange, lay_out
from holdfast.pacing.profile import SnapshotMode
from holdfast.snapshot.copying import HostCopies, Pair, TornCopyDetector, UnchangedTensorCache
from holdfast.snapshot.device_copies import DeviceCopies
from holdfast.snapshot.host_buffers import Arena
from holdfast.state.registry import Captured
from holdfast.system.host_memory import is_plain


class Layout:
    """One arena, and all that depends only on a state's structure: worked out once, used for every snapshot."""

    slots: list[TensorRange]
    views: dict[str, str]

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self._structure: object = None
        self._shared = True
        self._forget()

    def fit(self, captured: Captured, *, shared: bool) -> None:
        """Get ready for such a state; nothing to do when it is built as the one before.

        Raises:
            MemoryError: there is no room for it.
            TypeError: it holds a tensor of a kind that cannot be stored.
        """
        if self._structure is captured.structure and self._shared == shared:
            return
        self._structure = None
        self._forget()
        stored = {name: stored_as(name, tensor) for name, tensor in captured.tensors.items()}
        slots = lay_out((name, dtype, shape) for name, (dtype, shape, _) in stored.items())
        pinned = any(tensor.is_cuda for tensor in captured.tensors.values())
        self.arena.reserve(slots[-1].end if slots else 0, shared=shared, pinned=pinned)
        self.slots = slots
        self.views = {name: view for name, (_, _, view) in stored.items() if view is not None}
        self._plan(captured)
        self._structure, self._shared = captured.structure, shared

    def start(self, captured: Captured, mode: SnapshotMode, *, digests: bool) -> None:
        """Copy what forward may change, and remember how the rest is now."""
        self._watchdog.remember(digests=digests)
        for name in self._at_once:
            self._targets[name].copy_(captured.tensors[name].detach())
        for device in self._devices:
            device.start(self._targets, captured.tensors, mode)

    def copy_host(self) -> list[str]:
        """Copy the rest as far as it lies in host memory; devices are told to copy theirs.

        Names of the tensors that changed while they were copied. To be asked before the update that changes
        them by right.
        """
        for device in self._devices:
            device.queue()
        self._frozen.run()
        self._host.run()
        for pair in self._odd:
            pair.target.copy_(pair.source.detach())
        changed = self._watchdog.changed()
        if changed:
            self._frozen.forget()  # what it holds may be among them
        return changed

    def lend(self) -> memoryview:
        """All of its memory, for something else until the next snapshot. OSError where that cannot be."""
        self.arena.unseal()
        self._frozen.forget()
        return self.arena.bytes(self.arena.size_bytes)

    def hold_update(self) -> None:
        for device in self._devices:
            device.hold_update()

    def quiesce(self) -> None:
        """After a failure: wait until no device writes to the arena any more."""
        for device in self._devices:
            device.quiesce()

    def finish(self) -> list[str]:
        """Wait until what devices hold is in the arena, too; names of the tensors that changed meanwhile."""
        return [name for device in self._devices for name in device.finish()]

    @property
    def device_copy_seconds(self) -> float | None:
        """Tg of the last snapshot; None when it did not stop over on a device."""
        measured = [d.device_copy_seconds for d in self._devices if d.device_copy_seconds is not None]
        return max(measured, default=None)

    @property
    def copied_on_device(self) -> bool:
        """It is known what a stop-over on the device costs; so it is where there is no device."""
        return not self._devices or self.device_copy_seconds is not None

    @property
    def device_memory(self) -> tuple[int, int]:
        """(M, Mmax) in bytes of the device with the least room; zeros where there is none."""
        found = [device.memory for device in self._devices]
        return min(found, key=lambda each: each[1] - each[0], default=(0, 0))

    def _forget(self) -> None:
        """Let go of all views into the arena, which may be about to be replaced."""
        self.slots, self.views = [], {}
        self._targets: dict[str, torch.Tensor] = {}
        self._at_once: list[str] = []
        self._devices: list[DeviceCopies] = []
        self._odd: list[Pair] = []
        self._host, self._frozen = HostCopies([]), UnchangedTensorCache([])
        self._watchdog = TornCopyDetector([])

    def _plan(self, captured: Captured) -> None:
        pairs = {}
        for slot in self.slots:
            source = captured.tensors[slot.name]
            pairs[slot.name] = Pair(slot, source, self._target(slot, source))
        self._targets = {name: pair.target for name, pair in pairs.items()}
        host = {name: pair for name, pair in pairs.items() if pair.source.device.type != "cuda"}
        later = {name: pair for name, pair in host.items() if name in captured.deferred}
        self._at_once = [name for name in host if name not in later]
        frozen = {name: pair for name, pair in later.items() if name in captured.frozen and is_plain(pair.source)}
        moving = [pair for name, pair in later.items() if name not in frozen]
        self._frozen = UnchangedTensorCache(list(frozen.values()))
        self._host = HostCopies([pair for pair in moving if is_plain(pair.source)])
        self._odd = [pair for pair in moving if not is_plain(pair.source)]
        self._watchdog = TornCopyDetector(list(later.values()), captured.kept)
        self._devices = [self._on(device, pairs, captured) for device in _cuda_devices(captured)]

    def _on(self, device: torch.device, pairs: dict[str, Pair], captured: Captured) -> DeviceCopies:
        here = {name: pair for name, pair in pairs.items() if pair.source.device == device}
        deferred = [pair for name, pair in here.items() if name in captured.deferred]
        return DeviceCopies(device, [name for name in here if name not in captured.deferred], deferred)

    def _target(self, slot: TensorRange, source: torch.Tensor) -> torch.Tensor:
        """The slot as a tensor of the source's own dtype and shape."""
        flat = self.arena.tensor(slot.start, slot.end)
        if source.dtype in PAIRED:
            return torch.view_as_complex(flat.view(PAIRED[source.dtype]).view(slot.shape))
        return flat.view(source.dtype).view(source.shape)


def _cuda_devices(captured: Captured) -> list[torch.device]:
    return sorted({t.device for t in captured.tensors.values() if t.is_cuda}, key=lambda device: device.index or 0)
