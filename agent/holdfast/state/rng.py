"""The random state of a process, of every generator that training draws from by default, and of a script's own."""

from __future__ import annotations

import array
import hashlib
import random
import sys
from collections.abc import Collection, Mapping
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
        state["cuda_device"] = torch.cuda.current_device()
    return state


def require_rng(state: Any) -> None:
    """ValueError for what is no state that `rng_state` gave, as far as it shows without the values of tensors."""
    match state:
        case {
            "python": [int(), torch.Tensor(dtype=torch.int64) as words, float() | None],
            "torch": torch.Tensor(dtype=torch.uint8),
        }:
            if tuple(words.shape) != (625,):
                raise ValueError("the state of Python's generator has another length")
        case _:
            raise ValueError("it holds no state of Python's generator and of torch's")
    match state.get("numpy"):
        case None if "numpy" not in state:
            pass
        case ["MT19937", torch.Tensor(dtype=torch.int64, shape=(624,)), int(), int(), float()]:
            pass
        case _:
            raise ValueError("the state of NumPy's generator is none")
    cuda = state.get("cuda", [])
    if not isinstance(cuda, list) or not all(isinstance(each, torch.Tensor) for each in cuda):
        raise ValueError("the state of CUDA's generators is none")
    device = state.get("cuda_device", 0)
    if cuda and not (isinstance(device, int) and 0 <= device < len(cuda)):
        raise ValueError("it names a CUDA device that it holds no state of")


def restore_rng(state: Mapping[str, Any]) -> None:
    """Put back what `rng_state` gave; what this process has no use for is passed over.

    The CUDA device that is current goes on as the one that was, which may have had another number.
    """
    random.setstate(_to_python(state["python"]))
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy

        kind, words, *rest = state["numpy"]
        numpy.random.set_state((kind, words.numpy().astype("uint32"), *rest))
    if "cuda" in state and torch.cuda.is_available():
        states = state["cuda"]
        torch.cuda.set_rng_state_all(states[: torch.cuda.device_count()])
        torch.cuda.set_rng_state(states[state.get("cuda_device", 0)])  # earlier checkpoints do not note which


STREAMS = frozenset({"python", "torch", "numpy", "cuda"})
"""As `rng_state` names them."""


def branch_rng(key: int, streams: Collection[str] = STREAMS) -> None:
    """Begin streams of random numbers that follow from `key` and each from where that of this process is."""
    if "cuda" not in streams:
        pass
    elif torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        for generator in torch.cuda.default_generators:
            _branch_torch(generator, key)
    elif torch.cuda.is_available():  # when CUDA comes into use, this seed comes after a state put back before
        torch.cuda.manual_seed_all(_seed(_bytes_of(torch.default_generator), key))
    if "torch" in streams:
        _branch_torch(torch.default_generator, key)
    if "python" in streams:
        _branch_python(random, key)
    if "numpy" in streams and (numpy := sys.modules.get("numpy")) is not None and "numpy.random" in sys.modules:
        _branch_numpy(numpy.random, key)


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

    def branch(self, key: int) -> None:
        """Begin a stream that follows from where this one is, and from `key`."""
        generator = self._generator
        if isinstance(generator, torch.Generator):
            _branch_torch(generator, key)
        elif isinstance(generator, random.Random):
            _branch_python(generator, key)
        elif hasattr(generator, "set_state"):
            _branch_numpy(generator, key)
        else:
            body = generator.bit_generator
            body.state = type(body)(_seed(generator.bytes(16), key)).state


def _branch_torch(generator: torch.Generator, key: int) -> None:
    generator.manual_seed(_seed(_bytes_of(generator), key))


def _branch_python(generator: Any, key: int) -> None:
    """Of the module `random`, too."""
    generator.seed(_seed(generator.randbytes(16), key))


def _branch_numpy(generator: Any, key: int) -> None:
    """Of the old kind, of which the module `numpy.random` is one. Its `seed` is for one algorithm alone."""
    algorithm = getattr(sys.modules["numpy.random"], generator.get_state(legacy=False)["bit_generator"])
    generator.set_state(algorithm(_seed(generator.bytes(16), key)).state)


def _seed(drawn: bytes, key: int) -> int:
    return int.from_bytes(hashlib.blake2b(drawn + f"/{key}".encode(), digest_size=8).digest(), "little")


def _bytes_of(generator: torch.Generator) -> bytes:
    """Where it is. Numbers drawn from a CUDA device would take memory on it, and one process need not use all."""
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
    # 625 numbers as one tensor, by way of an array: torch.tensor looks at each of them several times
    return [version, torch.frombuffer(array.array("q", keys), dtype=torch.int64), gauss]


def _to_python(state: list[Any]) -> tuple[Any, ...]:
    version, keys, gauss = state
    return version, tuple(keys.tolist()), gauss
