"""What only CUDA and ROCm offer: pinning of existing host memory, and events that let a waiting thread sleep."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

SLEEPING = {"blocking": True}
"""Options of an event whose waiting thread sleeps; without them it spins."""


def register(address: int, size_bytes: int) -> str | None:
    """Pin host memory for copies from the current device; return why it failed, or `None`."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = runtime.cudaHostRegister(address, size_bytes, 0)
    if int(error) == 0:
        return None
    with contextlib.suppress(Exception):  # else the next kernel of this thread would report the failure
        torch.ones(1, device="cuda")
    return str(runtime.cudaGetErrorString(error))


def unregister(address: int) -> None:
    """Unregister memory before it is unmapped; later copies would otherwise go to the old pages of the address."""
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
