"""How large the training is that all contenders checkpoint. Known without torch: the driver needs no memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

VOCABULARY = 2048
BYTES_PER_PARAMETER = 12
"""Of state: a weight and Adam's two moments, in float32."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How large the model is, and how much it is fed an iteration."""

    layers: int = 10
    width: int = 448
    head_width: int = 64
    batch: int = 1
    tokens: int = 64
    device: str = "cpu"

    @classmethod
    def of_state(cls, gigabytes: float, device: str) -> Scale:
        """A model of about so much state; 24 layers, and a batch that keeps a fast GPU busy for some 0.3 s."""
        layers, parameters = 24, gigabytes * 1e9 / BYTES_PER_PARAMETER
        # 12 w² a layer and two tables of VOCABULARY rows: the positive root
        width = (math.sqrt(VOCABULARY**2 + 12 * layers * parameters) - VOCABULARY) / (12 * layers)
        batch = max(1, round(3e13 / (6 * parameters * 1024)))
        return cls(layers=layers, width=max(1, round(width / 64)) * 64, batch=batch, tokens=1024, device=device)

    @property
    def state_bytes(self) -> int:
        """About."""
        parameters = 12 * self.layers * self.width**2 + (2 * VOCABULARY + self.tokens) * self.width
        return BYTES_PER_PARAMETER * parameters

    @classmethod
    def small(cls, device: str) -> Scale:
        """For a look at whether everything works."""
        return cls(layers=10, width=128, tokens=64, device=device)
