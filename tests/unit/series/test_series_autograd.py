"""An autograd program that does not change keeps what it saves in the store."""

from __future__ import annotations

import gc

import torch
from torch import Tensor

from holdfast_series import Autoencoder, Codec, SeriesStore, Zfp

SIDE = 48


def misfit(squared: Tensor, steps: int = 12) -> Tensor:
    """The energy of a wave after some steps, by autograd."""
    row = torch.arange(SIDE, dtype=squared.dtype)
    now = torch.exp(-((row[:, None] - 20) ** 2 + (row - 26) ** 2) / 18)
    before = now
    for _ in range(steps):
        laplacian = sum(torch.roll(now, shift, dim) for shift in (1, -1) for dim in (0, 1)) - 4 * now
        before, now = now, 2 * now - before + squared * laplacian
    return now.square().sum()


def gradient(codec: Codec | str | None) -> Tensor:
    squared = torch.full((SIDE, SIDE), 0.2, requires_grad=True)
    if codec is None:
        misfit(squared).backward()
    else:
        with SeriesStore(codec=codec) as store:
            with store.saved_tensors():
                value = misfit(squared)
            assert store.report().states >= 12
            value.backward()
    assert squared.grad is not None
    return squared.grad


def test_raw_states_give_the_same_gradient_to_the_bit() -> None:
    assert torch.equal(gradient("raw"), gradient(None))


def test_a_tolerance_bounds_the_error_of_the_gradient() -> None:
    exact = gradient(None)
    for codec, most in ((Zfp(1e-4), 1e-3), (Autoencoder(1e-2, hidden=8, train_states=4, iterations=5), 5e-2)):
        assert float((gradient(codec) - exact).norm() / exact.norm()) < most


def test_parameters_and_small_tensors_stay_as_they_are() -> None:
    weight = torch.randn(64, 64, requires_grad=True)
    with SeriesStore() as store:
        with store.saved_tensors():
            (weight * weight).sum().backward()
            (torch.ones(8, requires_grad=True).exp() * 2).sum()
        assert store.report().puts == 0
    assert weight.grad is not None
    assert torch.equal(weight.grad, 2 * weight.detach())


def test_states_go_with_the_graph() -> None:
    squared = torch.full((SIDE, SIDE), 0.2, requires_grad=True)
    with SeriesStore() as store:
        with store.saved_tensors():
            value = misfit(squared)
        assert store.report().states > 0
        value.backward(retain_graph=True)
        value.backward()
        del value
        gc.collect()
        report = store.report()
        assert (report.states, report.raw_bytes, report.memory_bytes) == (0, 0, 0)


def test_states_of_autograd_are_none_of_the_series() -> None:
    squared = torch.full((SIDE, SIDE), 0.2, requires_grad=True)
    with SeriesStore() as store:
        store.put(0, torch.ones(3))
        with store.saved_tensors():
            value = misfit(squared)
        assert [step for step, _ in reversed(store)] == [0]
        store.clear()
        value.backward()
    assert squared.grad is not None
    assert torch.equal(squared.grad, gradient(None))
