"""Facts about the machine, printed above the figures."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from .limits import direct_io_works

PACKAGES = (
    "torch",
    "holdfast",
    "safetensors",
    "torch_checkpointing",
    "torchsnapshot",
    "nvidia-resiliency-ext",
    "lightning",
)
IN_MEMORY = ("tmpfs", "ramfs")


def facts(folder: Path, device: str) -> list[str]:
    """Return the lines above the table. Does not import torch: the driver must leave memory to the contenders."""
    kind, where = filesystem(folder)
    lines = [
        f"machine     {_processor()}, {len(os.sched_getaffinity(0))} cores, {_memory_gigabytes():.0f} GB, "
        f"{platform.system()} {platform.release()}, device {device}",
        f"checkpoints {folder} on {kind} ({where}), direct I/O "
        + ("works" if direct_io_works(folder) else "DOES NOT WORK there"),
        "versions    " + ", ".join(_versions()),
    ]
    if kind in IN_MEMORY:
        lines.append(f"!!! {kind} IS MEMORY, NOT A DISK: nothing here is durable, and every figure is too good")
    return lines


def filesystem(folder: Path) -> tuple[str, str]:
    """Return the type of the file system and its device."""
    best = ("unknown", "unknown")
    longest = -1
    for line in Path("/proc/self/mounts").read_text().splitlines():
        device, mount, kind = line.split()[:3]
        if folder.resolve().is_relative_to(mount) and len(mount) >= longest:
            best, longest = (kind, device), len(mount)
    return best


def available_bytes() -> int:
    return _meminfo("MemAvailable")


def _versions() -> list[str]:
    found = []
    for package in PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"no {package}")
    return found


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _memory_gigabytes() -> float:
    return _meminfo("MemTotal") / 1e9


def _meminfo(key: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return 0
