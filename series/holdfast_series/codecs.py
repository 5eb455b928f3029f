"""Codecs of single states: raw, half precision, and the error-bounded compressors zfp and SZ3.

Elements that miss the tolerance are stored with the payload, so that a few of them do not cost a whole state. A
correction is a multiple of the largest error that is allowed, so that half of that error remains. Stored are the
number of bytes of a distance, the distances between corrected elements, and the multiples.
"""

from __future__ import annotations

import abc
import importlib
import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Size, Tensor

Payload: TypeAlias = Tensor | bytes
"""A tensor may stay on its device; bytes are on the host."""
HALF_TOLERANCE = 2.0**-11
"""Rounding error of half precision, relative to the largest magnitude of a state."""
_MOST_DIMENSIONS = 3
_DISTANCES = (np.uint8, np.uint16, np.uint32, np.uint64)
_MOST = 127


@dataclass(frozen=True, slots=True)
class StateFormat:
    """What is known of a state without its elements."""

    shape: Size
    dtype: torch.dtype
    """Single or double precision, in which it is encoded."""
    scale: float = 1.0
    """Its largest magnitude."""
    limit: float = 0.0
    """Largest error of an element that is allowed."""


class Codec(abc.ABC):
    """Encodes one state at a time. The store checks the error, so that a codec may miss its tolerance."""

    name: str
    tolerance: float
    """Largest error of an element, relative to the largest magnitude of its state."""
    size_bytes = 0
    """Memory of what was learned and is needed to decode."""
    training_seconds = 0.0

    @abc.abstractmethod
    def encode(self, state: Tensor, form: StateFormat) -> Payload | None:
        """Return the payload of a state; `None` while the codec learns from states."""

    @abc.abstractmethod
    def decode(self, payload: Payload, form: StateFormat) -> Tensor:
        """Return the state as a new tensor, in any precision and on any device."""


class Raw(Codec):
    """Stores states as they are."""

    name = "raw"
    tolerance = 0.0

    def encode(self, state: Tensor, form: StateFormat) -> Payload:
        return state.clone(memory_format=torch.contiguous_format)

    def decode(self, payload: Payload, form: StateFormat) -> Tensor:
        return _tensor(payload, form.dtype).clone().view(form.shape)


class Half(Codec):
    """Half precision, scaled by a power of two so that nothing overflows. Has a tolerance of 2^-11."""

    name = "half"
    tolerance = HALF_TOLERANCE

    def encode(self, state: Tensor, form: StateFormat) -> Payload:
        return _times_power_of_two(state, -math.frexp(form.scale)[1]).half().contiguous()

    def decode(self, payload: Payload, form: StateFormat) -> Tensor:
        half = _tensor(payload, torch.half).view(form.shape)
        return _times_power_of_two(half.to(form.dtype), math.frexp(form.scale)[1])


class Zfp(Codec):
    """The compressor zfp, for smooth fields. The tolerance is relative to the largest magnitude of a state."""

    name = "zfp"

    def __init__(self, tolerance: float = 1e-3) -> None:
        self.tolerance = checked_tolerance(tolerance)
        self._zfpy = required_library("zfpy", self.name)

    def encode(self, state: Tensor, form: StateFormat) -> Payload:
        return bytes(self._zfpy.compress_numpy(_field(state).numpy(), tolerance=form.limit))

    def decode(self, payload: Payload, form: StateFormat) -> Tensor:
        return torch.from_numpy(self._zfpy.decompress_numpy(payload)).view(form.shape)


class Sz3(Codec):
    """The compressor SZ3. The tolerance is relative to the largest magnitude of a state."""

    name = "sz3"

    def __init__(self, tolerance: float = 1e-3) -> None:
        self.tolerance = checked_tolerance(tolerance)
        self._pysz = required_library("pysz", self.name)

    def encode(self, state: Tensor, form: StateFormat) -> Payload:
        field = _field(state)
        settings = self._pysz.szConfig(tuple(field.shape))
        settings.errorBoundMode, settings.absErrorBound = self._pysz.szErrorBoundMode.ABS, form.limit
        return bytes(self._pysz.sz.compress(field.numpy(), settings)[0])

    def decode(self, payload: Payload, form: StateFormat) -> Tensor:
        stored = torch.frombuffer(bytearray(payload), dtype=torch.uint8).numpy()
        dtype = torch.empty(0, dtype=form.dtype).numpy().dtype
        return torch.from_numpy(self._pysz.sz.decompress(stored, dtype, _field_shape(form.shape))[0]).view(
            form.shape
        )


def checked_tolerance(tolerance: float) -> float:
    """Return it; ValueError unless it is greater than 0 and below 1."""
    if not 0 < tolerance < 1:
        raise ValueError(
            f"tolerance={tolerance!r} must be greater than 0 and less than 1; Raw() stores exact states"
        )
    return float(tolerance)


def required_library(module: str, codec: str) -> Any:
    """Import the library of a codec; ImportError that names the extra."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        raise ImportError(
            f"codec {codec!r} needs {module}: pip install {module}, or install holdfast-series with its extra "
            "`codecs`"
        ) from None


def _tensor(payload: Payload, dtype: torch.dtype) -> Tensor:
    if isinstance(payload, Tensor):
        return payload
    return torch.frombuffer(bytearray(payload), dtype=dtype) if payload else torch.empty(0, dtype=dtype)


def _times_power_of_two(state: Tensor, exponent: int) -> Tensor:
    """Multiply in two exact steps: one factor may be outside the range of single precision."""
    first = exponent // 2
    return state * 2.0**first * 2.0 ** (exponent - first)


def _field(state: Tensor) -> Tensor:
    return state.reshape(_field_shape(state.shape)).contiguous().cpu()


def _field_shape(shape: Size) -> tuple[int, ...]:
    """Merge leading dimensions until there are at most three, and leave out those of one element."""
    sides = [side for side in shape if side > 1] or [1]
    leading = len(sides) - _MOST_DIMENSIONS + 1
    return (math.prod(sides[:leading]), *sides[leading:]) if leading > 1 else tuple(sides)


def corrections(error: Tensor, limit: float) -> bytes:
    """Return what brings each element of an error within `limit`; nothing if that takes too much space."""
    found = error.reshape(-1).cpu().numpy()
    places = np.flatnonzero(np.abs(found) > limit)
    multiples = np.rint(found[places] / limit)
    if 5 * len(places) > len(found) or not (np.abs(multiples) <= _MOST).all():
        return b""
    distances = np.diff(places, prepend=0)
    width = next(kind for kind in _DISTANCES if int(distances.max()) <= np.iinfo(kind).max)
    stored = distances.astype(width)
    return bytes([stored.itemsize]) + stored.tobytes() + multiples.astype(np.int8).tobytes()


def apply_corrections(decoded: Tensor, stored: bytes, limit: float) -> Tensor:
    """Return the corrected state; it may be `decoded`, changed in place."""
    if not stored:
        return decoded
    decoded = decoded.contiguous()
    width = stored[0]
    count = (len(stored) - 1) // (width + 1)
    distances = np.frombuffer(stored, dtype=f"u{width}", count=count, offset=1)
    multiples = np.frombuffer(stored, dtype=np.int8, offset=1 + count * width)
    places = torch.from_numpy(np.cumsum(distances, dtype=np.int64)).to(decoded.device)
    decoded.view(-1).index_add_(0, places, torch.from_numpy(multiples * limit).to(decoded))
    return decoded
