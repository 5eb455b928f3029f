"""100,000 iterations without trouble: the rule that restores by itself fires at most once.

The trainings are those of `benchmarks.loss_spikes`, twenty seeds of each at once. All but one converge to zero,
where a loss varies by orders of magnitude.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from benchmarks.loss_spikes import restores

SEEDS = 20
Layers = list[tuple[Tensor, Tensor]]


def layers(*widths: int) -> Layers:
    """Return the weights of one network per seed, drawn as torch.nn.Linear draws them."""

    def drawn(inputs: int, *shape: int) -> Tensor:
        return ((2 * torch.rand(SEEDS, *shape) - 1) / inputs**0.5).requires_grad_()

    return [(drawn(a, a, b), drawn(a, 1, b)) for a, b in itertools.pairwise(widths)]


def outputs(network: Layers, activation: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    for number, (weights, biases) in enumerate(network):
        inputs = torch.baddbmm(biases, activation(inputs) if number else inputs, weights)
    return inputs


def sums(count: int) -> tuple[Tensor, Tensor]:
    inputs = torch.rand(SEEDS, count, 8)
    return inputs, inputs.sum(2, keepdim=True)


def points(count: int) -> tuple[Tensor, Tensor]:
    inputs = 4 * torch.rand(SEEDS, count, 2) - 2
    return inputs, torch.sin(3 * inputs[..., :1]) * inputs[..., 1:] + 0.05 * torch.randn(SEEDS, count, 1)


TRAININGS = {
    "MLP, sums, 4 ranks of batch 20": (sums, 80, 20, (8, 64, 64, 1), torch.relu, 3e-3),
    "MLP, sums, batch 20": (sums, 20, 20, (8, 64, 64, 1), torch.relu, 3e-3),
    "MLP, sums, batch 80": (sums, 80, 80, (8, 64, 64, 1), torch.relu, 1e-3),
    "linear, sums, batch 20": (sums, 20, 20, (8, 1), torch.relu, 1e-2),
    "MLP, regression, batch 64": (points, 64, 64, (2, 64, 64, 1), torch.tanh, 1e-3),
}


def losses(name: str, iterations: int) -> list[list[float]]:
    """Return the losses of each seed; those of the first samples, as one rank of several reports them."""
    draw, count, reported, widths, activation, rate = TRAININGS[name]
    torch.manual_seed(1)
    network = layers(*widths)
    optimizer = torch.optim.AdamW([each for layer in network for each in layer], lr=rate, foreach=True)
    curves = torch.empty(iterations, SEEDS)
    for iteration in range(iterations):
        inputs, targets = draw(count)
        errors = (outputs(network, activation, inputs) - targets).square()
        curves[iteration] = errors[:, :reported].detach().mean((1, 2))
        optimizer.zero_grad()
        errors.mean((1, 2)).sum().backward()
        optimizer.step()
    return curves.T.tolist()


@pytest.mark.parametrize("iterations", [1000, pytest.param(10_000, marks=pytest.mark.long)])
def test_good_losses_are_restored_at_most_once(iterations: int) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        curves = {name: losses(name, iterations) for name in TRAININGS}
    finally:
        torch.set_num_threads(threads)
    converged = [curve[-1] / curve[0] for name in TRAININGS if "sums" in name for curve in curves[name]]
    assert max(converged) < 1e-2
    fired = {name: sum(map(restores, curves[name])) for name in TRAININGS}
    assert sum(len(curve) for found in curves.values() for curve in found) >= 100_000
    assert sum(fired.values()) <= 1, fired
