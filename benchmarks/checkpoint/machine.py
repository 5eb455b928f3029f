"""Facts about what is measured, printed above the figures."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from benchmarks.disk import direct_io_works

PACKAGES = (
    *("torch", "holdfast", "safetensors", "torch_checkpointing", "torchsnapshot"),
    *("nvidia-resiliency-ext", "lightning"),
)
IN_MEMORY = ("tmpfs", "ramfs")


def facts(folder: Path, device: str) -> list[str]:
    """Return the lines above the table. Does not import torch: the driver must leave memory to the contenders."""
    mounts = [
        each for each in psutil.disk_partitions(all=True) if folder.resolve().is_relative_to(each.mountpoint)
    ]
    disk = max(mounts, key=lambda each: len(each.mountpoint))
    works = "works" if direct_io_works(folder) else "DOES NOT WORK there"
    lines = [
        f"checkpoints {folder} on {disk.fstype} ({disk.device}), direct I/O {works}, device {device}",
        "versions    " + ", ".join(map(_version, PACKAGES)),
    ]
    if disk.fstype in IN_MEMORY:
        lines.append(
            f"!!! {disk.fstype} IS MEMORY, NOT A DISK: nothing here is durable, and every figure is too good"
        )
    return lines


def _version(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"no {package}"
