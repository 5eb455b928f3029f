"""Learned codecs: blocks of 64 elements, mapped to fewer coefficients, which are stored as bytes.

The last two dimensions of a state are cut into blocks of 8 × 8, and a vector into blocks of 64. Coefficients are
rounded to multiples of one step and compressed by Zstandard.
"""

from __future__ import annotations

import abc
import math
import struct
import time
from collections.abc import Iterable

import torch
from torch import Size, Tensor
from torch.nn import functional as F  # noqa: N812

from holdfast.codecs.planes import NumberCompressor, decompress
from holdfast_series.codecs import Codec, Payload, StateFormat, checked_tolerance

SIDE = 8
BLOCK = SIDE * SIDE
_MOST = 127


def to_blocks(state: Tensor) -> Tensor:
    """Return a state as (fields, rows of blocks, columns of blocks, 64), padded with its own edges."""
    if state.dim() < 2:
        flat = F.pad(state.reshape(-1), (0, -state.numel() % BLOCK))
        return flat.view(1, 1, -1, BLOCK)
    rows, columns = state.shape[-2:]
    fields = state.reshape(-1, rows, columns)
    if rows % SIDE or columns % SIDE:
        fields = F.pad(fields[None], (0, -columns % SIDE, 0, -rows % SIDE), mode="replicate")[0]
    high, wide = fields.shape[1] // SIDE, fields.shape[2] // SIDE
    return fields.reshape(-1, high, SIDE, wide, SIDE).transpose(2, 3).reshape(-1, high, wide, BLOCK)


def from_blocks(blocks: Tensor, shape: Size) -> Tensor:
    """Undo `to_blocks`."""
    if len(shape) < 2:
        return blocks.reshape(-1)[: math.prod(shape)].reshape(shape)
    high, wide = blocks.shape[1:3]
    fields = blocks.view(-1, high, wide, SIDE, SIDE).transpose(2, 3).reshape(-1, high * SIDE, wide * SIDE)
    return fields[:, : shape[-2], : shape[-1]].reshape(shape)


def block_grid(shape: Size) -> tuple[int, int, int]:
    """Return the numbers of fields and of rows and columns of blocks."""
    if len(shape) < 2:
        return 1, 1, -(-math.prod(shape) // BLOCK)
    return math.prod(shape[:-2]), -(-shape[-2] // SIDE), -(-shape[-1] // SIDE)


class BlockCodec(Codec):
    """A codec that learns from the first states, and then maps blocks to `latents` coefficients each.

    It learns once; from then on it does not change, and may serve many stores, such as those of other sources.
    """

    step_share: float
    """Rounding step of coefficients: the error of an element that one of them makes, relative to the tolerance."""

    def __init__(self, tolerance: float, latents: int, train_states: int) -> None:
        if not 0 < latents <= BLOCK:
            raise ValueError(f"latents={latents!r} must be 1 to {BLOCK}, the elements of a block")
        if train_states < 1:
            raise ValueError(f"train_states={train_states!r} must be at least 1")
        self.tolerance = checked_tolerance(tolerance)
        self.latents, self.train_states = latents, train_states
        self._seen = 0
        self._device: torch.device | None = None  # of what was learned
        self._compressor = NumberCompressor()

    @abc.abstractmethod
    def observe(self, blocks: Tensor) -> None:
        """Take note of a state to learn from, scaled to a largest magnitude of 1."""

    @abc.abstractmethod
    def learn(self) -> list[Tensor]:
        """Learn from the states seen, and return the tensors to keep."""

    @abc.abstractmethod
    def analyze(self, blocks: Tensor) -> Tensor:
        """Map blocks to coefficients."""

    @abc.abstractmethod
    def synthesize(self, coefficients: Tensor) -> Tensor:
        """Map coefficients to blocks."""

    def fit(self, states: Iterable[Tensor]) -> None:
        """Learn from these states, such as those of other sources, instead of from the first that are stored."""
        if self._device is not None:
            raise ValueError(f"codec {self.name!r} has already learned, and states depend on it: create a new one")
        for state in states:
            scale = float(state.abs().max())
            if 0 < scale < math.inf:
                self._observe(state, scale)
        if not self._seen:
            raise ValueError("fit() needs at least one state that is finite and not zero everywhere")
        self._train()

    def encode(self, state: Tensor, form: StateFormat) -> Payload | None:
        if self._device is None:
            self._observe(state, form.scale)
            if self._seen >= self.train_states:
                self._train()
            return None
        coefficients = self.analyze(to_blocks(state.to(self._device, torch.float32) / form.scale))
        step = self.tolerance * SIDE * self.step_share
        step = max(step, float(coefficients.abs().max()) / _MOST)
        whole = torch.round(coefficients / step).to(torch.int8).cpu()
        return struct.pack("<f", step) + self._compressor.compress(whole.numpy().tobytes())

    def decode(self, payload: Payload, form: StateFormat) -> Tensor:
        assert isinstance(payload, bytes)
        (step,) = struct.unpack_from("<f", payload)
        grid = (*block_grid(form.shape), self.latents)
        content = bytearray(decompress(memoryview(payload)[4:], math.prod(grid)))
        whole = torch.frombuffer(content, dtype=torch.int8).view(grid).to(self._device, torch.float32)
        return from_blocks(self.synthesize(whole * step), form.shape).mul_(form.scale)

    def _observe(self, state: Tensor, scale: float) -> None:
        started = time.perf_counter()
        self._seen += 1
        self.observe(to_blocks(state.detach().float() / scale))
        self.training_seconds += time.perf_counter() - started

    def _train(self) -> None:
        started = time.perf_counter()
        learned = self.learn()
        self.size_bytes = sum(tensor.nbytes for tensor in learned)
        self._device = learned[0].device
        self.training_seconds += time.perf_counter() - started


class BlockCovariance:
    """The second moments of blocks, summed as they come."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None

    def add(self, blocks: Tensor) -> None:
        flat = blocks.reshape(-1, BLOCK)
        added = flat.T @ flat
        self._sum = added if self._sum is None else self._sum + added

    def leading_directions(self, count: int) -> Tensor:
        """Return the `count` directions with the most energy, as columns."""
        assert self._sum is not None
        directions: Tensor = torch.linalg.eigh(self._sum.double())[1]
        return directions.flip(1)[:, :count].float().contiguous()


class StreamingPCA(BlockCodec):
    """Principal components of blocks of 64 elements, from sums that grow with each of the first states.

    Args:
        tolerance: largest error of an element, relative to the largest magnitude of its state.
        latents: number of components that are kept of each block.
        train_states: number of states to learn from. They are stored in half precision or raw.
    """

    name = "pca"
    step_share = 0.2

    def __init__(self, tolerance: float = 3e-2, *, latents: int = 16, train_states: int = 64) -> None:
        super().__init__(tolerance, latents, train_states)
        self._covariance = BlockCovariance()

    def observe(self, blocks: Tensor) -> None:
        self._covariance.add(blocks)

    def learn(self) -> list[Tensor]:
        self._directions = self._covariance.leading_directions(self.latents)
        return [self._directions]

    def analyze(self, blocks: Tensor) -> Tensor:
        return blocks @ self._directions

    def synthesize(self, coefficients: Tensor) -> Tensor:
        return coefficients @ self._directions.T
