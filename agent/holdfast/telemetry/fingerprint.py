"""The environment that results depend on bit for bit."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from holdfast.distributed.ranks import rank_and_world_size

ENVIRONMENT = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO", "NCCL_PROTO")
DRIVER = Path("/proc/driver/nvidia/version")
_FLAGS: dict[str, Callable[[], Any]] = {
    "deterministic algorithms": torch.are_deterministic_algorithms_enabled,
    "matmul precision": torch.get_float32_matmul_precision,
    "cudnn.benchmark": lambda: torch.backends.cudnn.benchmark,
    "cudnn.deterministic": lambda: torch.backends.cudnn.deterministic,
    "TF32 in matmul": lambda: torch.backends.cuda.matmul.allow_tf32,
    "TF32 in cudnn": lambda: torch.backends.cudnn.allow_tf32,
    "default dtype": lambda: str(torch.get_default_dtype()).removeprefix("torch."),
}


def versions() -> dict[str, str]:
    """Return the versions that a checkpoint and an attempt record."""
    return {
        "holdfast": importlib.metadata.version("holdfast"),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


def fingerprint() -> dict[str, str]:
    """Describe the versions, devices, ranks, threads, flags and the commit of the script of this process."""
    found = _of_machine(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
    found = found | {"ranks": str(rank_and_world_size()[1])} | of_thread()
    for name, flag in _FLAGS.items():
        with contextlib.suppress(RuntimeError):  # the old TF32 flag raises after a script set the new one
            found[name] = str(flag())
    return found | {name: value for name in ENVIRONMENT if (value := os.environ.get(name))}


def of_thread() -> dict[str, str]:
    """Describe what differs between threads; for the training thread."""
    return {"threads": str(torch.get_num_threads())}


def difference(then: Mapping[str, str], now: Mapping[str, str]) -> str | None:
    """Describe how two fingerprints differ; None when they are equal."""
    if not then:
        return None  # not recorded
    changed = [
        f"{name} {then.get(name, 'unset')} → {now.get(name, 'unset')}"
        for name in [*then, *(name for name in now if name not in then)]
        if then.get(name) != now.get(name)
    ]
    return f"resume is valid, bit-exactness is not promised: {'; '.join(changed)}" if changed else None


@functools.cache
def _of_machine(on_cuda: bool) -> dict[str, str]:
    """Describe what does not change while a process runs."""
    found = {
        "holdfast": importlib.metadata.version("holdfast"),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
    }
    if (numpy := sys.modules.get("numpy")) is not None:
        found["numpy"] = numpy.__version__
    if on_cuda:
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        found |= {
            "devices": ", ".join(names),
            "CUDA": str(torch.version.cuda),
            "cuDNN": str(torch.backends.cudnn.version()),  # type: ignore[no-untyped-call]
            "driver": _driver(),
        }
    if (commit := _commit(getattr(sys.modules.get("__main__"), "__file__", None))) is not None:
        found["code"] = commit
    return found


def _driver() -> str:
    with contextlib.suppress(OSError):
        if said := re.search(r"Kernel Module(?: for \S+)?\s+([\d.]+)", DRIVER.read_text()):
            return said[1]
    return "unknown"


def _commit(script: str | None) -> str | None:
    """Return the commit of the repository of the script, read from its files, without uncommitted changes."""
    if script is None:
        return None
    with contextlib.suppress(OSError):
        for folder in Path(script).resolve().parents:
            if (git := folder / ".git").exists():
                return _head(_git_directory(git))
    return None


def _git_directory(git: Path) -> Path:
    if git.is_dir():
        return git
    return git.parent / git.read_text().removeprefix("gitdir:").strip()  # a linked work tree


def _head(git: Path) -> str | None:
    head = (git / "HEAD").read_text().strip()
    if not head.startswith("ref: "):
        return head[:12]
    ref, common = head.removeprefix("ref: "), git
    if (git / "commondir").exists():
        common = git / (git / "commondir").read_text().strip()
    if (common / ref).exists():
        return (common / ref).read_text().strip()[:12]
    packed = (common / "packed-refs").read_text().splitlines()
    return next((line[:12] for line in packed if line.endswith(f" {ref}")), None)
