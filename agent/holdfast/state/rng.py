"""Random state: of the default generators of a process, and of generators of the script."""

from __future__ import annotations

import array
import hashlib
import random
import sys
from collections.abc import Collection, Mapping
from typing import Any

import torch

from holdfast import accelerators


def rng_state() -> dict[str, Any]:
    """Return the random state of Python, torch, each accelerator, and NumPy's global generator if in use."""
    state: dict[str, Any] = {"python": _of_python(random.getstate()), "torch": torch.get_rng_state()}
    if (numpy := sys.modules.get("numpy")) is not None and "numpy.random" in sys.modules:
        kind, keys, position, has_gauss, gauss = numpy.random.get_state()
        state["numpy"] = [kind, torch.from_numpy(keys.astype("int64")), position, has_gauss, gauss]
    for kind, module in accelerators.modules_in_use().items():
        state[kind] = list(module.get_rng_state_all())
        state[f"{kind}_device"] = module.current_device()
    return state


def require_rng(state: Any) -> None:
    """Raise ValueError for what `rng_state` cannot have returned. The values of tensors are not read."""
    match state:
        case {
            "python": [int(), torch.Tensor(dtype=torch.int64) as words, float() | None],
            "torch": torch.Tensor(dtype=torch.uint8),
        }:
            if tuple(words.shape) != (625,):
                raise ValueError("the state of Python's generator has the wrong length")
        case _:
            raise ValueError("the state of Python's or torch's generator is missing")
    match state.get("numpy"):
        case None if "numpy" not in state:
            pass
        case ["MT19937", torch.Tensor(dtype=torch.int64, shape=(624,)), int(), int(), float()]:
            pass
        case _:
            raise ValueError("the state of NumPy's generator is invalid")
    for kind in accelerators.KINDS:
        states, device = state.get(kind, []), state.get(f"{kind}_device")
        if not isinstance(states, list) or not all(isinstance(each, torch.Tensor) for each in states):
            raise ValueError(f"the state of the generators of {kind} is invalid")
        if states and not (isinstance(device, int) and 0 <= device < len(states)):
            raise ValueError(f"there is no state of the current device of {kind}")


def restore_rng(state: Mapping[str, Any]) -> None:
    """Restore what `rng_state` returned, as far as this process uses it.

    The current device gets the state of the one that was current, which may have had another number.
    """
    random.setstate(_to_python(state["python"]))
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy

        kind, words, *rest = state["numpy"]
        numpy.random.set_state((kind, words.numpy().astype("uint32"), *rest))
    for kind in accelerators.KINDS:
        module = accelerators.module_of(kind)
        if kind in state and module.is_available():
            states = state[kind]
            module.set_rng_state_all(states[: module.device_count()])
            module.set_rng_state(states[state[f"{kind}_device"]])


STREAMS = frozenset({"python", "torch", "numpy", *accelerators.KINDS})
"""Keys of `rng_state`."""


def branch_rng(key: int, streams: Collection[str] = STREAMS) -> None:
    """Start new streams of random numbers, each derived from `key` and the current state of its generator."""
    for kind in accelerators.KINDS:
        if kind in streams:
            _branch_accelerators(accelerators.module_of(kind), key)
    if "torch" in streams:
        _branch_torch(torch.default_generator, key)
    if "python" in streams:
        _branch_python(random, key)
    if "numpy" in streams and (numpy := sys.modules.get("numpy")) is not None and "numpy.random" in sys.modules:
        _branch_numpy(numpy.random, key)


def is_generator(item: object) -> bool:
    """Whether an object is a random generator of torch, NumPy (either kind) or Python."""
    return _kind(item) is not None


class StatefulGenerator:
    """Gives a random generator of the script `state_dict` and `load_state_dict`."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator
        self.kind = _kind(generator)
        """Kind of state that the generator takes: torch's depends on the device, NumPy's on the algorithm."""

    def state_dict(self) -> dict[str, Any]:
        generator = self.generator
        if isinstance(generator, torch.Generator):
            state: Any = generator.get_state()
        elif isinstance(generator, random.Random):
            state = _of_python(generator.getstate())
        elif hasattr(generator, "get_state"):
            state = generator.get_state(legacy=False)  # with the normal deviate that NumPy's old kind keeps
        else:
            state = generator.bit_generator.state
        return {"kind": self.kind, "state": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        generator, state = self.generator, state_dict["state"]
        if isinstance(generator, torch.Generator):
            generator.set_state(state)
        elif isinstance(generator, random.Random):
            generator.setstate(_to_python(state))
        elif hasattr(generator, "set_state"):
            generator.set_state(state)
        else:
            generator.bit_generator.state = state

    def branch(self, key: int) -> None:
        """Start a new stream, derived from `key` and the current state."""
        generator = self.generator
        if isinstance(generator, torch.Generator):
            _branch_torch(generator, key)
        elif isinstance(generator, random.Random):
            _branch_python(generator, key)
        elif hasattr(generator, "set_state"):
            _branch_numpy(generator, key)
        else:
            body = generator.bit_generator
            body.state = type(body)(_seed(generator.bytes(16), key)).state


def _branch_accelerators(module: Any, key: int) -> None:
    if module.is_initialized():
        for generator in module.default_generators:
            _branch_torch(generator, key)
    elif module.is_available():  # applied when it is initialized, after a restored state
        module.manual_seed_all(_seed(_bytes_of(torch.default_generator), key))


def _branch_torch(generator: torch.Generator, key: int) -> None:
    generator.manual_seed(_seed(_bytes_of(generator), key))


def _branch_python(generator: Any, key: int) -> None:
    """Branch a generator of Python, or the module `random`."""
    generator.seed(_seed(generator.randbytes(16), key))


def _branch_numpy(generator: Any, key: int) -> None:
    """Branch a generator of NumPy's old kind, or the module `numpy.random`, with any algorithm."""
    algorithm = getattr(sys.modules["numpy.random"], generator.get_state(legacy=False)["bit_generator"])
    generator.set_state(algorithm(_seed(generator.bytes(16), key)).state)


def _seed(drawn: bytes, key: int) -> int:
    return int.from_bytes(hashlib.blake2b(drawn + f"/{key}".encode(), digest_size=8).digest(), "little")


def _bytes_of(generator: torch.Generator) -> bytes:
    """Return the state. Drawing numbers would allocate memory on every device instead."""
    return bytes(generator.get_state().tolist())


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
    # by way of an array: torch.tensor is slow for 625 numbers
    return [version, torch.frombuffer(array.array("q", keys), dtype=torch.int64), gauss]


def _to_python(state: list[Any]) -> tuple[Any, ...]:
    version, keys, gauss = state
    return version, tuple(keys.tolist()), gauss
