"""Stage `managed`: snapshot and restore of tensors in CUDA's managed memory, by a pluggable allocator.

The allocator is a pair of functions of this module, which call the CUDA runtime that torch has loaded: no library
has to be compiled.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

import holdfast
from benchmarks.harness import seconds_of
from holdfast.checkpoint import restore
from holdfast.format.manifest import digest_tensor
from holdfast.store import open_store
from holdfast.system.host_memory import bytes_of

from .stages import CaseResult, Cases, Context

NUMBERS = 64 << 20
"""Of float32, 0.25 GB; with momentum and gradients 0.75 GB, or an eighth of what is free."""
ITERATIONS, ROUNDS = 3, 5
GLOBAL = 1
"""cudaMemAttachGlobal."""
MOST_SLOWER = 1.5
"""A read by the device after a snapshot takes at most so many times as long as before it: no page was moved."""


class ManagedAllocator:
    """Functions with the signatures that torch asks of an allocator, over `cudaMallocManaged`."""

    def __init__(self) -> None:
        loaded = {
            line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "cudart" in line
        }
        self._runtime = ctypes.CDLL(min(loaded))
        self.allocated_bytes = 0
        void, size, number = ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int
        # kept as attributes: torch has their addresses only
        self._allocate = ctypes.CFUNCTYPE(void, size, number, void)(self._malloc)
        self._release = ctypes.CFUNCTYPE(None, void, size, number, void)(self._free)

    def pool(self) -> Any:
        """Return a memory pool of torch over these functions."""
        addresses = [ctypes.cast(each, ctypes.c_void_p).value for each in (self._allocate, self._release)]
        allocator = torch._C._cuda_customAllocator(*addresses)  # type: ignore[attr-defined]
        return torch.cuda.MemPool(allocator)

    def _malloc(self, size_bytes: int, device: int, stream: int | None) -> int | None:
        pointer = ctypes.c_void_p()
        if self._runtime.cudaMallocManaged(ctypes.byref(pointer), ctypes.c_size_t(size_bytes), GLOBAL):
            return None
        self.allocated_bytes += size_bytes
        return pointer.value

    def _free(self, pointer: int | None, size_bytes: int, device: int, stream: int | None) -> None:
        self._runtime.cudaFree(ctypes.c_void_p(pointer))


def snapshots(context: Context) -> CaseResult:
    """Train in managed memory; compare what was stored, what a restore in place gives, and where pages are."""
    if context.device != "cuda":
        return CaseResult({}, note="needs CUDA")
    free_bytes, _ = torch.cuda.mem_get_info()
    numbers = min(NUMBERS, free_bytes // (8 * 3 * 4))
    allocator = ManagedAllocator()
    pool = allocator.pool()
    torch.manual_seed(0)
    with torch.cuda.use_mem_pool(pool):
        part = nn.Parameter(torch.randn(numbers, device="cuda"))
        optimizer = torch.optim.SGD([part], lr=0.1, momentum=0.9)
        _update(part, optimizer)
    model = nn.ParameterList([part])
    session = holdfast.Session(
        "managed", store=context.folder / "managed", server="", every=1, keep=100, model=model, optimizer=optimizer
    )
    digests: dict[int, str] = {}
    ratios = []
    with session:
        for _ in range(ITERATIONS):
            _update(part, optimizer)
            digests[session.iteration + 1] = _digest(part)
            before = _read_seconds(part)
            session.step()
            session.wait(60)
            ratios.append(_read_seconds(part) / before)
        _update(part, optimizer)
        session.restore(2)
        session.step()
        restored = _digest(part)
        wrong = [number for number, digest in digests.items() if _stored(context, number) != digest]
    slower = median(ratios)
    is_exact = not wrong and restored == digests[2]
    values = {
        "managed_mb": allocator.allocated_bytes / 1e6,
        "exact": is_exact,
        "device_read_after_of_before": slower,
    }
    return CaseResult(values, is_exact and slower <= MOST_SLOWER and allocator.allocated_bytes > 0)


def _update(part: nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
    part.square().mean().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def _digest(part: torch.Tensor) -> str:
    return digest_tensor(bytes_of(part.detach().cpu()))[0]


def _read_seconds(part: torch.Tensor) -> float:
    """Return the duration of the first read of all pages by the device."""

    def read() -> None:
        part.detach().sum()
        torch.cuda.synchronize()

    torch.cuda.synchronize()
    return seconds_of(read)


def _stored(context: Context, iteration: int) -> str | None:
    store = open_store(context.folder / "managed")
    found = next(each for each in store.checkpoints("managed") if int(each.partition("-")[0]) == iteration)
    manifest = restore.verify(store, "managed", found)
    return next(each.digest for each in manifest.tensors if each.name.startswith("model"))


CASES: Cases = {"snapshot and restore": snapshots}
