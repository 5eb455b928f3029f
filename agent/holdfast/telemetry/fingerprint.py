"""Where and how a state was trained, as far as the bits of a result depend on it."""

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


def fingerprint() -> dict[str, str]:
    """What this process computes with, in words: versions, devices, ranks, threads, flags, the script's commit."""
    found = _of_machine(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
    found = found | {"ranks": str(rank_and_world_size()[1])} | of_thread()
    for name, flag in _FLAGS.items():
        with contextlib.suppress(RuntimeError):  # a script that sets TF32 the new way may not ask the old one
            found[name] = str(flag())
    return found | {name: value for name in ENVIRONMENT if (value := os.environ.get(name))}


def of_thread() -> dict[str, str]:
    """What of it is another one on each thread: it must be asked for on the one that trains."""
    return {"threads": str(torch.get_num_threads())}


def difference(then: Mapping[str, str], now: Mapping[str, str]) -> str | None:
    """What a person should know of a state from `then` that is trained on `now`; None when all is the same."""
    if not then:
        return None  # of a Holdfast that did not note it
    changed = [
        f"{name} {then.get(name, 'unset')} → {now.get(name, 'unset')}"
        for name in [*then, *(name for name in now if name not in then)]
        if then.get(name) != now.get(name)
    ]
    return f"resume is valid, bit-exactness is not promised: {'; '.join(changed)}" if changed else None


@functools.cache
def _of_machine(on_cuda: bool) -> dict[str, str]:
    """What stays as it is while a process runs."""
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
    """The commit that the script's repository is at, read from its files; what is not committed shows nowhere."""
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
    return git.parent / git.read_text().removeprefix("gitdir:").strip()  # of a further work tree


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
