"""The size of the training, without torch, so that the driver needs little memory."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

VOCABULARY = 2048
BYTES_PER_PARAMETER = 12
"""State per parameter: a weight and Adam's two moments, in float32."""


@dataclass(frozen=True, slots=True)
class TrainingScale:
    """Size of the model and of a batch."""

    layers: int = 10
    width: int = 448
    head_width: int = 64
    batch: int = 1
    tokens: int = 64
    device: str = "cpu"

    @classmethod
    def of_state(cls, gigabytes: float, device: str) -> TrainingScale:
        """Return a model of about so much state: 24 layers, and a batch that takes a fast GPU about 0.3 s."""
        layers, parameters = 24, gigabytes * 1e9 / BYTES_PER_PARAMETER
        # 12 w² a layer and two tables of VOCABULARY rows: the positive root
        width = (math.sqrt(VOCABULARY**2 + 12 * layers * parameters) - VOCABULARY) / (12 * layers)
        batch = max(1, round(3e13 / (6 * parameters * 1024)))
        return cls(layers=layers, width=max(1, round(width / 64)) * 64, batch=batch, tokens=1024, device=device)

    @classmethod
    def with_short_iterations(cls, gigabytes: float) -> TrainingScale:
        """Return a model of about so much state, and a batch that a CPU trains in about the time of an update."""
        return dataclasses.replace(cls.of_state(gigabytes, "cpu"), batch=1, tokens=64)

    @property
    def state_bytes(self) -> int:
        """Approximate number of bytes."""
        parameters = 12 * self.layers * self.width**2 + (2 * VOCABULARY + self.tokens) * self.width
        return BYTES_PER_PARAMETER * parameters

    @classmethod
    def small(cls, device: str) -> TrainingScale:
        """Return a small size for a smoke test."""
        return cls(layers=10, width=128, tokens=64, device=device)
