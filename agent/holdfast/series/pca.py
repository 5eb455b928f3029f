"""Principal components of the blocks of states."""

from __future__ import annotations

from torch import Tensor

from holdfast.series.blocks import BlockCodec, BlockCovariance


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
