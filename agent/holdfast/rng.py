"""The random state of a process, of every generator that training draws from by default, and of a script's own."""

from __future__ import annotations

import array
import hashlib
import random
import sys
from collections.abc import Mapping
from typing import Any

import torch


def rng_state() -> dict[str, Any]:
    """Random state of this process: Python, NumPy's global one where NumPy is in use, torch, each CUDA device."""
    state: dict[str, Any] = {"python": _of_python(random.getstate()), "torch": torch.get_rng_state()}
    if (numpy := sys.modules.get("numpy")) is not None and "numpy.random" in sys.modules:
        kind, keys, position, has_gauss, gauss = numpy.random.get_state()
        state["numpy"] = [kind, torch.from_numpy(keys.astype("int64")), position, has_gauss, gauss]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = list(torch.cuda.get_rng_state_all())
    return state


def restore_rng(state: Mapping[str, Any]) -> None:
    """Put back what `rng_state` gave; what this process has no use for is passed over."""
    random.setstate(_to_python(state["python"]))
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy

        kind, words, *rest = state["numpy"]
        numpy.random.set_state((kind, words.numpy().astype("uint32"), *rest))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])


def branch_rng(key: int) -> None:
    """Begin streams of random numbers that follow from where those of this process are, and from `key`."""
    drawn = torch.randint(2**62, (2,), device="cpu").tolist()
    seed = int.from_bytes(hashlib.blake2b(f"{drawn}/{key}".encode(), digest_size=8).digest(), "little")
    random.seed(seed)
    torch.manual_seed(seed >> 1)
    if (numpy := sys.modules.get("numpy")) is not None and "numpy.random" in sys.modules:
        numpy.random.seed(seed & 0xFFFF_FFFF)


def is_generator(item: object) -> bool:
    """A generator of the script's own: torch's, NumPy's new kind or its old one, Python's."""
    return _kind(item) is not None


class OwnGenerator:
    """A generator of the script's own, as something that has a `state_dict`."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator
        self.kind = _kind(generator)
        """Which states it takes: torch's depend on the device, NumPy's on the algorithm."""

    def state_dict(self) -> dict[str, Any]:
        generator = self._generator
        if isinstance(generator, torch.Generator):
            state: Any = generator.get_state()
        elif isinstance(generator, random.Random):
            state = _of_python(generator.getstate())
        elif hasattr(generator, "get_state"):
            state = generator.get_state(
                legacy=False
            )  # NumPy's old kind keeps half a normal deviate beside its bits
        else:
            state = generator.bit_generator.state
        return {"kind": self.kind, "state": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        generator, state = self._generator, state_dict["state"]
        if isinstance(generator, torch.Generator):
            generator.set_state(state)
        elif isinstance(generator, random.Random):
            generator.setstate(_to_python(state))
        elif hasattr(generator, "set_state"):
            generator.set_state(state)
        else:
            generator.bit_generator.state = state


def _kind(item: object) -> str | None:
    if isinstance(item, torch.Generator):
        return f"torch.Generator on {item.device.type}"
    if isinstance(item, random.Random) and not isinstance(item, random.SystemRandom):
        return "random.Random"
    random_of_numpy = getattr(sys.modules.get("numpy"), "random", None)
    if random_of_numpy is not None and isinstance(item, random_of_numpy.Generator):
        return f"numpy.random.Generator of {type(item.bit_generator).__name__}"
    if random_of_numpy is not None and isinstance(item, random_of_numpy.RandomState):
        return "numpy.random.RandomState"
    return None


def _of_python(state: tuple[Any, ...]) -> list[Any]:
    version, keys, gauss = state
    # 625 numbers as one tensor, by way of an array: torch.tensor looks at each of them several times
    return [version, torch.frombuffer(array.array("q", keys), dtype=torch.int64), gauss]


def _to_python(state: list[Any]) -> tuple[Any, ...]:
    version, keys, gauss = state
    return version, tuple(keys.tolist()), gauss
