"""A small autoencoder of the blocks of states, which sees the neighbors of each block."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F  # noqa: N812

from holdfast_series.blocks import BLOCK, SIDE, BlockCodec, BlockCovariance

CROP_BLOCKS = 16
"""Training uses pieces of 16 × 16 blocks, so that its cost does not grow with the states."""
MAX_CROPS = 256
BATCH = 8
LEARNING_RATE = 3e-3
RATE_WEIGHT = 0.1
"""Weight of the size of coefficients in the loss, against the squared error in units of the tolerance."""


class Autoencoder(BlockCodec):
    """An autoencoder of some 20,000 parameters, trained once on the first states, on their device.

    It starts from the principal components of the blocks. Convolutions over neighbors then learn what these leave
    out. Each process trains its own; nothing is communicated. The result depends on the states and on
    `seed` only.

    Args:
        tolerance: largest error of an element, relative to the largest magnitude of its state.
        latents: number of coefficients of each block of 64 elements.
        hidden: width of the hidden layers.
        train_states: number of states to learn from. They are stored in half precision or raw.
        iterations: iterations of training.
        seed: of initial weights, batches and noise.
    """

    name = "autoencoder"
    step_share = 0.3

    def __init__(
        self,
        tolerance: float = 3e-2,
        *,
        latents: int = 16,
        hidden: int = 32,
        train_states: int = 64,
        iterations: int = 400,
        seed: int = 0,
    ) -> None:
        super().__init__(tolerance, latents, train_states)
        self.hidden, self.iterations = hidden, iterations
        self._generator = torch.Generator().manual_seed(seed)
        self._covariance = BlockCovariance()
        self._crops: list[Tensor] = []

    def observe(self, blocks: Tensor) -> None:
        self._covariance.add(blocks)
        if len(self._crops) == MAX_CROPS:
            del self._crops[self._draw(MAX_CROPS)]
        self._crops.append(self._crop(blocks))

    def learn(self) -> list[Tensor]:
        directions = self._covariance.leading_directions(self.latents)
        # The store may call this without gradients, or inside of hooks that would store what training saves.
        plain = saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
        with torch.inference_mode(False), torch.enable_grad(), plain:
            self._weights = self._initial_weights(directions.clone())
            self._optimize(torch.stack(self._crops).clone())
        self._crops.clear()
        self._weights = [weight.detach() for weight in self._weights]
        return self._weights

    def analyze(self, blocks: Tensor) -> Tensor:
        directions, near, mix, *_ = self._weights
        coefficients = blocks @ directions
        return coefficients + _neighborhood(coefficients, near) @ mix

    def synthesize(self, coefficients: Tensor) -> Tensor:
        *_, directions, near, mix = self._weights
        return coefficients @ directions + _neighborhood(coefficients, near) @ mix

    def _initial_weights(self, directions: Tensor) -> list[Tensor]:
        """Return those of the principal components; the layers that see neighbors start without effect."""
        shape = (self.hidden, self.latents, 3, 3)
        near = [torch.randn(shape, generator=self._generator) * (9 * self.latents) ** -0.5 for _ in range(2)]
        mix = [torch.zeros(self.hidden, self.latents), torch.zeros(self.hidden, BLOCK)]
        weights = [directions, near[0], mix[0], directions.T.clone(), near[1], mix[1]]
        return [weight.to(directions.device).requires_grad_() for weight in weights]

    def _optimize(self, crops: Tensor) -> None:
        optimizer = torch.optim.Adam(self._weights, lr=LEARNING_RATE)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=self.iterations + 1)
        step = self.tolerance * SIDE * self.step_share
        for _ in range(self.iterations):
            drawn = torch.randint(len(crops), (BATCH,), generator=self._generator)
            batch = crops[drawn.to(crops.device)]
            coefficients = self.analyze(batch)
            rounding = torch.rand(coefficients.shape, generator=self._generator).to(crops.device) - 0.5
            error = (self.synthesize(coefficients + rounding * step) - batch) / self.tolerance
            rate = torch.log1p((coefficients / step).square()).mean() * self.latents / BLOCK
            loss = error.square().mean() + RATE_WEIGHT * rate
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()

    def _crop(self, blocks: Tensor) -> Tensor:
        fields, rows, columns = blocks.shape[:3]
        field = blocks[self._draw(fields)]
        row, column = self._draw(max(rows - CROP_BLOCKS, 0) + 1), self._draw(max(columns - CROP_BLOCKS, 0) + 1)
        crop = field[row : row + CROP_BLOCKS, column : column + CROP_BLOCKS]
        return F.pad(crop, (0, 0, 0, CROP_BLOCKS - crop.shape[1], 0, CROP_BLOCKS - crop.shape[0]))

    def _draw(self, count: int) -> int:
        return int(torch.randint(count, (1,), generator=self._generator))


def _neighborhood(coefficients: Tensor, weight: Tensor) -> Tensor:
    """Convolve over the grid of blocks; the last dimension holds the channels."""
    return F.relu(F.conv2d(coefficients.permute(0, 3, 1, 2), weight, padding=1)).permute(0, 2, 3, 1)
