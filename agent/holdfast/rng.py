"""The random state of a process, of every generator that training draws from by default."""

from __future__ import annotations

import array
import random
import sys
from collections.abc import Mapping
from typing import Any

import torch


def rng_state() -> dict[str, Any]:
    """Random state of this process: Python, NumPy's global one where NumPy is in use, torch, each CUDA device."""
    version, keys, gauss = random.getstate()
    state: dict[str, Any] = {
        # 625 numbers as one tensor, by way of an array: torch.tensor looks at each of them several times
        "python": [version, torch.frombuffer(array.array("q", keys), dtype=torch.int64), gauss],
        "torch": torch.get_rng_state(),
    }
    if (numpy := sys.modules.get("numpy")) is not None and "numpy.random" in sys.modules:
        kind, keys, position, has_gauss, gauss = numpy.random.get_state()
        state["numpy"] = [kind, torch.from_numpy(keys.astype("int64")), position, has_gauss, gauss]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = list(torch.cuda.get_rng_state_all())
    return state


def restore_rng(state: Mapping[str, Any]) -> None:
    """Put back what `rng_state` gave; what this process has no use for is passed over."""
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys.tolist()), gauss))
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy

        kind, words, *rest = state["numpy"]
        numpy.random.set_state((kind, words.numpy().astype("uint32"), *rest))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
