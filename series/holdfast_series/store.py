"""The store: puts states through a codec, checks the error of each, and gives them back newest first."""

from __future__ import annotations

import dataclasses
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from holdfast.errors import HoldfastError
from holdfast.torch_internals import never_compiled
from holdfast.units import parse_bytes
from holdfast_series.autoencoder import Autoencoder
from holdfast_series.blocks import StreamingPCA
from holdfast_series.codecs import Codec, Half, Payload, Raw, StateFormat, Sz3, Zfp, apply_corrections, corrections
from holdfast_series.tiers import SeriesStoreFull as SeriesStoreFull
from holdfast_series.tiers import StoredPayload, Tiers

CODECS: dict[str, Callable[[], Codec]] = {
    "raw": Raw, "half": Half, "zfp": Zfp, "sz3": Sz3, "pca": StreamingPCA, "autoencoder": Autoencoder,
}  # fmt: skip
SMALLEST_SAVED = 1024
"""Number of elements of the smallest tensor that the hooks of autograd store."""
MARGIN = 0.99
"""Share of the tolerance that codecs may use: rounding may differ a little between two decodings."""
_WIDE = {torch.float32: torch.float32, torch.float64: torch.float64, torch.float16: torch.float32,
         torch.bfloat16: torch.float32}  # fmt: skip
"""Types of elements that lossy codecs store, and those in which they compute."""


class NoSuchStep(HoldfastError, LookupError):
    """The store holds no state of that step."""


class SeriesStoreClosed(HoldfastError):
    """The store is closed, and its states are gone."""


@dataclass(slots=True)
class SeriesReport:
    """What a store holds, and what it did since it was made or cleared. Sizes in bytes, times in seconds."""

    codec: str
    states: int = 0
    """Number of states held, those of autograd included."""
    raw_bytes: int = 0
    """Size of these states without a codec."""
    device_bytes: int = 0
    memory_bytes: int = 0
    disk_bytes: int = 0
    codec_bytes: int = 0
    """Size of what the codec learned."""
    puts: int = 0
    """Number of states that were stored, removed ones included."""
    exact: int = 0
    """States stored raw because no tolerance applies: integers, complex numbers, NaN and infinity, or `Raw()`."""
    learned_from: int = 0
    """States that the codec learned from, which are stored in half precision or raw."""
    corrected: int = 0
    """States of which some elements missed the tolerance, and are stored with the payload."""
    half_fallbacks: int = 0
    """States that missed the tolerance, and are stored in half precision."""
    raw_fallbacks: int = 0
    """States that missed the tolerance, and are stored raw."""
    largest_error: float = 0.0
    """Largest error of an element, relative to the largest magnitude of its state."""
    encode_seconds: float = 0.0
    """Time of storing, with the check and without the training of the codec."""
    decode_seconds: float = 0.0
    training_seconds: float = 0.0

    @property
    def ratio(self) -> float:
        """Size without a codec, relative to the size with it and with what it learned."""
        held = self.device_bytes + self.memory_bytes + self.disk_bytes + self.codec_bytes
        return self.raw_bytes / held if held else math.nan


@dataclass(frozen=True, slots=True)
class _StoredState:
    like: Tensor
    """An empty tensor with the type and the device of the state."""
    form: StateFormat
    codec: Codec | None = None
    """`None` for a state of zeros, which has no payload."""
    payload: StoredPayload | None = None
    correction_bytes: int = 0
    """Size of the corrections at the end of the payload."""

    @property
    def raw_bytes(self) -> int:
        return math.prod(self.form.shape) * self.like.element_size()


@dataclass(eq=False, slots=True)
class _SavedTensor:
    """What autograd holds in place of a tensor; the state is removed with it."""

    state: _StoredState
    released: deque[_StoredState] = field(repr=False)

    @never_compiled
    def __del__(self) -> None:
        self.released.append(self.state)  # not removed here: the collector may run while the store is locked


class SeriesStore:
    """States of a time series, put in order and read newest first.

    Threads may share a store; they take turns. After a fork, the child may read what the store holds and put
    nothing. No thread may use the store at the moment of the fork.

    Args:
        codec: a codec, or the name of one with its defaults: `raw`, `half`, `zfp`, `sz3`, `pca`, `autoencoder`. A
            codec that learned may serve several stores, one after the other.
        memory: budget of host memory for states, such as `"2GB"`. The oldest states beyond it go to the disk.
        store: a directory for these. Its file has no name, and is removed with the process or by `close`.
        device_memory: budget for raw and half-precision states on their device; without one, they go to the host.

    Raises:
        ValueError: an argument has no meaning.
        ImportError: the codec needs a library that is not installed.
    """

    def __init__(
        self,
        *,
        codec: Codec | str = "raw",
        memory: str = "2GB",
        store: str | os.PathLike[str] | None = None,
        device_memory: str | None = None,
    ) -> None:
        if isinstance(codec, str) and codec not in CODECS:
            known = ", ".join(CODECS)
            raise ValueError(
                f"codec={codec!r} is unknown: write one of {known}; zfp and sz3 need the extra `codecs`"
            )
        self._codec = CODECS[codec]() if isinstance(codec, str) else codec
        device_bytes = 0 if device_memory is None else int(parse_bytes(device_memory, "device_memory"))
        self._tiers = Tiers(int(parse_bytes(memory, "memory")), device_bytes, store)
        self._raw, self._half = Raw(), Half()
        self._steps: dict[int, _StoredState] = {}
        self._released: deque[_StoredState] = deque()
        self._report = SeriesReport(self._codec.name)
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._closed = False

    def put(self, step: int, state: Tensor) -> None:
        """Store a copy of a state; it replaces one of the same step.

        Raises:
            SeriesStoreFull: neither memory nor disk has room for it.
        """
        with self._lock:
            self._require_writable()
            added = self._add(state)
            if (replaced := self._steps.pop(step, None)) is not None:
                self._remove(replaced)
            self._steps[step] = added

    def get(self, step: int) -> Tensor:
        """Return the state of a step, on the device and with the type that it had. A new tensor each time.

        Raises:
            NoSuchStep: the store holds no state of that step.
        """
        with self._lock:
            self._require_open()
            if (stored := self._steps.get(step)) is None:
                held = f"it holds steps {min(self._steps)} to {max(self._steps)}" if self._steps else "it is empty"
                raise NoSuchStep(f"the series store has no state of step {step}: {held}")
            return self._load(stored)

    def __reversed__(self) -> Iterator[tuple[int, Tensor]]:
        """Yield steps and their states, the one that was put last first."""
        for step in list(reversed(self._steps)):
            yield step, self.get(step)

    def __len__(self) -> int:
        return len(self._steps)

    def saved_tensors(self) -> saved_tensors_hooks:
        """Return a context manager in which autograd keeps what it saves for the backward pass in this store.

        Parameters and tensors of fewer than 1,024 elements stay as they are. A tensor that two operations save is
        stored twice. A state is removed when autograd frees its graph. With a lossy codec the gradient differs by
        what the tolerance allows.
        """
        return saved_tensors_hooks(self._pack, self._unpack)

    def clear(self) -> None:
        """Remove the states that were put, and reset the counts. What the codec learned stays."""
        with self._lock:
            self._require_writable()
            for stored in reversed(self._steps.values()):
                self._remove(stored)
            self._steps.clear()
            held = {"states": self._report.states, "raw_bytes": self._report.raw_bytes}
            self._report = SeriesReport(self._codec.name, **held)

    def report(self) -> SeriesReport:
        """Return what the store holds and did."""
        with self._lock:
            self._require_open()
            self._drop_released()
            used = self._tiers.used_bytes
            return dataclasses.replace(
                self._report,
                device_bytes=used["device"],
                memory_bytes=used["host"],
                disk_bytes=used["disk"],
                codec_bytes=self._codec.size_bytes,
                training_seconds=self._codec.training_seconds,
            )

    def close(self) -> None:
        """Remove all states from memory and disk."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._steps.clear()
                self._tiers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _pack(self, tensor: Tensor) -> Tensor | _SavedTensor:
        is_parameter = tensor.is_leaf and tensor.requires_grad
        if is_parameter or tensor.numel() < SMALLEST_SAVED:
            return tensor
        with self._lock:
            self._require_writable()
            return _SavedTensor(self._add(tensor), self._released)

    def _unpack(self, saved: Tensor | _SavedTensor) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        with self._lock:
            self._require_open()
            return self._load(saved.state)

    @torch.no_grad()
    def _add(self, state: Tensor) -> _StoredState:
        self._drop_released()
        started, trained_before = time.perf_counter(), self._codec.training_seconds
        stored = self._encoded(state.detach())
        trained = self._codec.training_seconds - trained_before
        self._report.encode_seconds += time.perf_counter() - started - trained
        self._report.puts += 1
        self._report.states += 1
        self._report.raw_bytes += stored.raw_bytes
        return stored

    def _encoded(self, state: Tensor) -> _StoredState:
        codec, report = self._codec, self._report
        if codec.tolerance == 0 or state.dtype not in _WIDE or not state.numel():
            return self._exact(state)
        wide = state.to(_WIDE[state.dtype])
        scale = float(wide.abs().max())
        form = StateFormat(state.shape, wide.dtype, scale, MARGIN * codec.tolerance * scale)
        if scale == 0:
            return _StoredState(state.new_empty(0), form)
        if not torch.finfo(wide.dtype).tiny < form.limit < math.inf:  # among denormal numbers it cannot be checked
            return self._exact(state)
        payload = codec.encode(wide, form)
        is_miss = payload is not None
        if payload is None:
            report.learned_from += 1
        elif kept := self._checked(codec, payload, wide, state, form):
            return kept
        may_be_half = state.element_size() > 2 and codec.name != self._half.name
        if may_be_half and (kept := self._checked(self._half, self._half.encode(wide, form), wide, state, form)):
            report.half_fallbacks += is_miss
            return kept
        report.raw_fallbacks += is_miss
        return self._kept(self._raw, self._raw.encode(state, form), state)

    def _exact(self, state: Tensor) -> _StoredState:
        self._report.exact += 1
        return self._kept(self._raw, self._raw.encode(state, StateFormat(state.shape, state.dtype)), state)

    def _checked(
        self, codec: Codec, payload: Payload, wide: Tensor, state: Tensor, form: StateFormat
    ) -> _StoredState | None:
        """Decode what was encoded, correct single elements, and keep it if each is within the limit."""
        decoded = codec.decode(payload, form).to(wide)
        missing, corrected = wide - decoded.to(state.dtype), b""
        error = float(missing.abs().max())
        if error > form.limit and isinstance(payload, bytes) and (corrected := corrections(missing, form.limit)):
            payload += corrected
            missing = wide - apply_corrections(decoded, corrected, form.limit).to(state.dtype)
            error = float(missing.abs().max())
        if not error <= form.limit:
            return None
        self._report.corrected += bool(corrected)
        self._report.largest_error = max(self._report.largest_error, error / form.scale)
        return self._kept(codec, payload, state, form, len(corrected))

    def _kept(
        self,
        codec: Codec,
        payload: Payload,
        state: Tensor,
        form: StateFormat | None = None,
        correction_bytes: int = 0,
    ) -> _StoredState:
        form = form or StateFormat(state.shape, state.dtype)
        return _StoredState(state.new_empty(0), form, codec, self._tiers.add(payload), correction_bytes)

    @torch.no_grad()
    def _load(self, stored: _StoredState) -> Tensor:
        if stored.codec is None or stored.payload is None:
            return stored.like.new_zeros(stored.form.shape)
        started = time.perf_counter()
        content, corrected = self._tiers.read(stored.payload), b""
        if isinstance(content, bytes) and stored.correction_bytes:
            content, corrected = content[: -stored.correction_bytes], content[-stored.correction_bytes :]
        state = stored.codec.decode(content, stored.form).to(stored.like.device, stored.form.dtype)
        state = apply_corrections(state, corrected, stored.form.limit).to(stored.like.dtype)
        self._report.decode_seconds += time.perf_counter() - started
        return state

    def _remove(self, stored: _StoredState) -> None:
        self._report.states -= 1
        self._report.raw_bytes -= stored.raw_bytes
        if stored.payload is not None:
            self._tiers.remove(stored.payload)

    def _drop_released(self) -> None:
        while self._released and os.getpid() == self._process:
            self._remove(self._released.popleft())

    def _require_open(self) -> None:
        if self._closed:
            raise SeriesStoreClosed("the series store is closed: read its states before close(), inside of `with`")

    def _require_writable(self) -> None:
        self._require_open()
        if os.getpid() != self._process:
            raise SeriesStoreClosed(
                "the series store belongs to the parent process: a forked child may only read it"
            )
