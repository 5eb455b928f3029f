"""What the loss of a simulated job does: the truth, which its policies can at best fit."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol


class Curve(Protocol):
    def loss_at(self, iteration: float) -> float: ...

    def iteration_of(self, loss: float) -> float:
        """Where the loss comes down to this; infinite where it never does."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Exponential:
    """floor + (start - floor) exp(-rate x iteration), the shape that COCI assumes."""

    rate: float
    start: float = 1.0
    floor: float = 0.0

    def loss_at(self, iteration: float) -> float:
        return self.floor + (self.start - self.floor) * math.exp(-self.rate * iteration)

    def iteration_of(self, loss: float) -> float:
        if loss >= self.start:
            return 0.0
        return (
            math.inf
            if loss <= self.floor
            else math.log((self.start - self.floor) / (loss - self.floor)) / self.rate
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerLaw:
    """floor + (start - floor) (1 + iteration / scale)^-exponent, the shape of large models' losses."""

    exponent: float
    scale: float = 1.0
    start: float = 1.0
    floor: float = 0.0

    def loss_at(self, iteration: float) -> float:
        return self.floor + (self.start - self.floor) * math.pow(1 + iteration / self.scale, -self.exponent)

    def iteration_of(self, loss: float) -> float:
        if loss >= self.start:
            return 0.0
        if loss <= self.floor:
            return math.inf
        return self.scale * (math.pow((self.start - self.floor) / (loss - self.floor), 1 / self.exponent) - 1)
