"""Accelerators: devices with streams and events, all used in the same way.

torch has a module for each kind of device. Those of CUDA, of ROCm (which torch calls "cuda") and of XPU share
the names that are used here, so that one path serves all of them. The classes `torch.Stream` and `torch.Event`
are not used: `torch.Event` ignores `blocking`, so that a thread that waits for a copy would spin on a core, and
neither works with the streams and events of a kind's own module. What only CUDA and ROCm have is in `cuda.py`.
"""

from __future__ import annotations

from typing import Any

import torch

from holdfast import cuda

KINDS = ("cuda", "xpu")
"""Device kinds that copy while training continues. Tensors on others are copied while training waits."""


def module_of(kind: str) -> Any:
    """Return the module of torch for a kind of device."""
    return getattr(torch, kind)


def is_accelerator(device: torch.device) -> bool:
    return device.type in KINDS


def modules_in_use() -> dict[str, Any]:
    """Return the modules of the device kinds that this process uses, without initializing any."""
    return {kind: module for kind in KINDS if (module := module_of(kind)).is_initialized()}


def are_in_use() -> bool:
    """Return whether this process uses any accelerator."""
    return bool(modules_in_use())


def is_capturing() -> bool:
    """Whether the current stream of this thread is being captured as a graph, so that it executes nothing."""
    modules = [each for each in modules_in_use().values() if hasattr(each, "is_current_stream_capturing")]
    return any(module.is_current_stream_capturing() for module in modules)


def is_current(device: torch.device) -> bool:
    """Whether it is the device that new tensors of its kind are on."""
    return is_accelerator(device) and bool(device.index == module_of(device.type).current_device())


def is_here(device: torch.device) -> bool:
    """Whether this machine has the accelerator."""
    module = module_of(device.type)
    return bool(module.is_available()) and (device.index or 0) < module.device_count()


def sleeping_event(kind: str) -> Any:
    """Return an event whose waiting thread sleeps, if the kind of device supports that."""
    return module_of(kind).Event(**(cuda.SLEEPING if kind == "cuda" else {}))


def memory_of(device: torch.device) -> tuple[int, int]:
    """Return (peak of this process plus use by other processes, total) of a device's memory, in bytes."""
    module = module_of(device.type)
    free, total = module.mem_get_info(device)
    stats = module.memory_stats_as_nested_dict(device)  # `memory_stats` takes ten times as long
    reserved, peak = stats["reserved_bytes"]["all"]["current"], stats["allocated_bytes"]["all"]["peak"]
    return total - free - reserved + peak, total
