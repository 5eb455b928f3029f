"""The 2-D acoustic wave equation, and the gradient of a data misfit with respect to the squared velocity.

    a u[n+1] = 2 u[n] - b u[n-1] + dt^2 (m L u[n] + s[n]),    m = c^2,  a = 1 + d,  b = 1 - d

L is a Laplacian of fourth order, d a damping layer, and s a Ricker wavelet at one point. Of the forward states the
adjoint needs L u[n] only, newest first: the gradient is the sum of dt^2 w[n+1] L u[n], below the water, whose
velocity is known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

CENTER, NEAR, FAR = -2.5, 4 / 3, -1 / 12
PAD = 2
"""Width of the frame of zeros around a field, as wide as the stencil reaches."""
DAMPING_POINTS = 16


@dataclass(frozen=True)
class Survey:
    """A grid, a time axis, the wavelet, and receivers in one row. Lengths in meters, times in seconds."""

    side: int = 144
    water: int = 16
    steps: int = 500
    spacing: float = 10.0
    time_step: float = 1.25e-3
    peak_hertz: float = 12.0
    depth: int = 4
    dtype: torch.dtype = torch.float32

    def wavelet(self) -> Tensor:
        """Return a Ricker wavelet, one value a step."""
        time = torch.arange(self.steps, dtype=torch.float64) * self.time_step - 1.2 / self.peak_hertz
        square = (math.pi * self.peak_hertz * time) ** 2
        return ((1 - 2 * square) * torch.exp(-square)).to(self.dtype) * 1e6

    def source(self, column: int) -> Tensor:
        """Return the shape of a source: a Gaussian at the depth of the receivers."""
        row, across = torch.meshgrid(*(torch.arange(self.side, dtype=self.dtype),) * 2, indexing="ij")
        return torch.exp(-((row - self.depth) ** 2 + (across - column) ** 2) / (2 * 1.5**2))

    def true_velocity(self) -> Tensor:
        """Return layers from 1500 to 3500 m/s, one with a fault and one with a lens, in m/s."""
        row, column = torch.meshgrid(*(torch.linspace(0, 1, self.side, dtype=torch.float64),) * 2, indexing="ij")
        velocity = torch.full_like(row, 1500.0)
        for number, top in enumerate((0.22, 0.35, 0.5, 0.7, 0.85)):
            edge = top + 0.04 * torch.sin(6 * column + 2 * number) + 0.08 * (column > 0.6) * (number > 1)
            velocity = torch.where(row > edge, 1900.0 + 400 * number, velocity)
        lens = ((row - 0.42) / 0.06) ** 2 + ((column - 0.35) / 0.18) ** 2 < 1
        return torch.where(lens, 3000.0, velocity).to(self.dtype)

    def first_velocity(self) -> Tensor:
        """Return a smooth guess, from which an inversion starts, in m/s."""
        smooth = self.true_velocity()[None, None]
        for _ in range(3):
            smooth = torch.nn.functional.avg_pool2d(
                torch.nn.functional.pad(smooth, (6,) * 4, mode="replicate"), 13, stride=1
            )
        return smooth[0, 0]


class Wave:
    """Steps of the forward and of the adjoint equation, for one squared velocity."""

    def __init__(self, survey: Survey, squared: Tensor) -> None:
        self.survey, self.squared = survey, squared
        self.step2 = survey.time_step**2
        depth = torch.arange(survey.side, dtype=survey.dtype)
        inside = torch.minimum(depth, survey.side - 1 - depth).clamp(max=DAMPING_POINTS) / DAMPING_POINTS
        edge = 0.12 * (1 - inside) ** 2
        damping = torch.maximum(edge[:, None], edge[None, :])
        self.inverse_a, self.minus_b = 1 / (1 + damping), damping - 1
        self.times_m = self.step2 * squared / survey.spacing**2

    def zeros(self) -> Tensor:
        """Return a field of zeros with its frame."""
        side = self.survey.side + 2 * PAD
        return torch.zeros(side, side, dtype=self.survey.dtype)

    def laplacian(self, field: Tensor) -> Tensor:
        """Return the Laplacian times the squared spacing of a field with a frame, without one."""
        near = field[1:-3, 2:-2] + field[3:-1, 2:-2]
        near += field[2:-2, 1:-3]
        near += field[2:-2, 3:-1]
        far = field[:-4, 2:-2] + field[4:, 2:-2]
        far += field[2:-2, :-4]
        far += field[2:-2, 4:]
        return near.mul_(NEAR).add_(far, alpha=FAR).add_(field[2:-2, 2:-2], alpha=2 * CENTER)

    def step(self, now: Tensor, before: Tensor, source: Tensor, force: float) -> Tensor:
        """Overwrite the state `before` the present one with the next; return the Laplacian of the present one."""
        laplacian = self.laplacian(now)
        inner = before[2:-2, 2:-2]
        inner.mul_(self.minus_b).addcmul_(self.times_m, laplacian).add_(now[2:-2, 2:-2], alpha=2)
        inner.add_(source, alpha=self.step2 * force).mul_(self.inverse_a)
        return laplacian

    def recorded(self, state: Tensor) -> Tensor:
        """Return what the receivers record of a state."""
        return state[2 + self.survey.depth, 2:-2].clone()

    def below_water(self, laplacian: Tensor) -> Tensor:
        """Return the part of a Laplacian that the adjoint needs."""
        return laplacian[self.survey.water :]


class Adjoint:
    """The adjoint equation, from the last step to the first."""

    def __init__(self, wave: Wave) -> None:
        self._wave = wave
        side = wave.survey.side
        self._newer = torch.zeros(side, side, dtype=wave.survey.dtype)
        self._newest = torch.zeros_like(self._newer)
        self._padded = wave.zeros()
        water = wave.survey.water
        self.gradient = torch.zeros(side - water, side, dtype=wave.survey.dtype)
        """With respect to the squared velocity below the water."""

    def step(self, residual: Tensor, laplacian: Tensor | None, weight: float = 1.0) -> None:
        """Go one step back, and add `weight` times its part of the gradient if there is a state for it."""
        wave = self._wave
        torch.mul(wave.times_m, self._newer, out=self._padded[2:-2, 2:-2])
        following = wave.laplacian(self._padded)
        following.add_(self._newer, alpha=2).addcmul_(wave.minus_b, self._newest)
        following[wave.survey.depth] += residual
        following.mul_(wave.inverse_a)
        self._newest, self._newer = self._newer, following
        if laplacian is not None:
            scale = weight * wave.step2 / wave.survey.spacing**2
            self.gradient.addcmul_(following[wave.survey.water :], laplacian, value=scale)
