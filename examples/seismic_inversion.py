"""Full-waveform inversion of a 2-D acoustic model, by autograd, with compressed forward states.

    python examples/seismic_inversion.py

`store.saved_tensors()` is the only line of Holdfast in the solver: what autograd saves in the forward pass goes
through the codec, and comes back in the backward pass.
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from holdfast_series import SeriesStore, Zfp

SPACING, TIME_STEP, PEAK_HERTZ = 10.0, 1.5e-3, 10.0
DEPTH, WATER = 3, 10
"""Rows of sources and receivers, and of the water, whose velocity is known."""


def models(side: int) -> tuple[Tensor, Tensor]:
    """Return the true velocity, with a fast lens below the water, and a first guess without it, in m/s."""
    row, column = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    first = torch.where(row < WATER, 1500.0, 1800.0 + 12.0 * (row - WATER))
    lens = ((row - 0.6 * side) / (0.12 * side)) ** 2 + ((column - 0.5 * side) / (0.22 * side)) ** 2 < 1
    return first + 300.0 * lens, first


def ricker(steps: int) -> list[float]:
    """Return the values of a Ricker wavelet."""
    angles = [(math.pi * PEAK_HERTZ * (step * TIME_STEP - 1.2 / PEAK_HERTZ)) ** 2 for step in range(steps)]
    return [(1 - 2 * angle) * math.exp(-angle) for angle in angles]


def damping(side: int) -> Tensor:
    """Return a sponge at the sides and the bottom."""
    place = torch.arange(side)
    edge = 0.08 * (1 - torch.minimum(place, side - 1 - place).clamp(max=12) / 12) ** 2
    bottom = torch.where(place > side / 2, edge, 0.0)
    return torch.maximum(bottom[:, None], edge[None, :])


def seismogram(velocity: Tensor, column: int, steps: int) -> Tensor:
    """Solve the acoustic wave equation for one source, and return what the receivers record."""
    side = len(velocity)
    sponge = damping(side)
    factor = (velocity * TIME_STEP / SPACING) ** 2
    source = torch.zeros(side, side)
    source[DEPTH, column] = 1.0
    now = before = torch.zeros(side, side)
    records = []
    for force in ricker(steps):
        padded = F.pad(now, (1, 1, 1, 1))
        neighbors = padded[:-2, 1:-1] + padded[2:, 1:-1] + padded[1:-1, :-2] + padded[1:-1, 2:]
        following = 2 * now - (1 - sponge) * before + factor * (neighbors - 4 * now) + force * source
        before, now = now, following / (1 + sponge)
        records.append(now[DEPTH])
    return torch.stack(records)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", type=int, default=96, help="grid points of a side")
    parser.add_argument("--steps", type=int, default=450)
    parser.add_argument("--iterations", type=int, default=8)
    options = parser.parse_args()
    truth, first = models(options.side)
    sources = [round(share * options.side) for share in (0.2, 0.5, 0.8)]
    observed = [seismogram(truth, column, options.steps) for column in sources]
    velocity = first.clone().requires_grad_()
    optimizer = torch.optim.Adam([velocity], lr=20.0)
    with SeriesStore(codec=Zfp(1e-2), memory="500MB") as store:
        for iteration in range(options.iterations):
            total = 0.0
            for column, recorded in zip(sources, observed, strict=True):
                with store.saved_tensors():
                    misfit = (seismogram(velocity, column, options.steps) - recorded).square().sum()
                ratio = store.report().ratio
                misfit.backward()
                total += misfit.item()
                del misfit  # its states go with it
            assert velocity.grad is not None
            velocity.grad[:WATER] = 0.0
            optimizer.step()
            optimizer.zero_grad()
            error = (velocity.detach() - truth).square().mean().sqrt()
            print(
                f"iteration {iteration}: misfit {total:.4g}, states compressed {ratio:.1f}×, error {error:.1f} m/s"
            )


if __name__ == "__main__":
    main()
