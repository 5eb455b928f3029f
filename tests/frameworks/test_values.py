"""Adapters give `lr_scale` and `grad_clip` to scripts that do not know of them."""

import sys

import pytest
import torch
from torch import nn

import holdfast
from tests.frameworks.lightning_fits import fit
from tests.frameworks.test_accelerate import Loop
from tests.frameworks.test_transformers import Fit

SCALE, NORM = 0.1, 1e-3


@pytest.fixture
def updates(monkeypatch):
    """Learning rate and norm of the gradients of each update."""
    module = sys.modules[torch.optim.Adam.__module__]
    seen, update = [], module.adam

    def recorded(params, grads, *arguments, **options):
        seen.append((options["lr"], torch.cat([each.flatten() for each in grads]).norm().item()))
        return update(params, grads, *arguments, **options)

    monkeypatch.setattr(module, "adam", recorded)
    return seen


@pytest.fixture
def operator(monkeypatch):
    """What operators have set values to, by name; also the default that the script gives for each."""
    wanted, defaults, own = {}, {}, holdfast.Session.value

    def value(self, name, default, **definition):
        defaults[name] = default
        own(self, name, default, **definition)
        return wanted.get(name, default)

    monkeypatch.setattr(holdfast.Session, "value", value)
    wanted["defaults"] = defaults
    return wanted


def rates(updates):
    return [rate for rate, _ in updates]


def norms(updates):
    return [norm for _, norm in updates]


def compare(train, updates, operator, default):
    """Train as the script is, and with the values of an operator."""
    own = train("own")
    before, rate = list(updates), own.param_groups[0]["lr"]
    assert operator["defaults"]["lr_scale"] == 1.0
    assert operator["defaults"]["grad_clip"] == default
    updates.clear()
    operator["lr_scale"], operator["grad_clip"] = SCALE, NORM
    changed = train("changed")
    assert rates(updates) == pytest.approx([SCALE * each for each in rates(before)])
    assert min(norms(before)) > 2 * NORM
    assert max(norms(updates)) < 1.01 * NORM
    assert changed.param_groups[0]["lr"] == rate


def test_lightning(tmp_path, updates, operator):
    def train(name):
        return fit(tmp_path / name, gradient_clip_val=0.5, max_epochs=1, job_name=name)[1].optimizers[0]

    compare(train, updates, operator, 0.5)


def test_transformers(tmp_path, updates, operator):
    def train(name):
        trainer, _ = Fit(tmp_path / name, num_train_epochs=1, eval_strategy="no").train()
        assert trainer.args.max_grad_norm == 1.0
        return trainer.optimizer.optimizer

    compare(train, updates, operator, 1.0)


def test_accelerate(tmp_path, updates, operator):
    def train(name):
        loop = Loop(tmp_path / name, accumulate=1)
        for features, classes, _ in loop.loader:
            loop.accelerator.backward(nn.functional.cross_entropy(loop.model(features), classes))
            loop.accelerator.clip_grad_norm_(loop.model.parameters(), 3.0)
            loop.optimizer.step()
            loop.optimizer.zero_grad()
            loop.session.step()
        loop.session.close()
        return loop.optimizer.optimizer

    compare(train, updates, operator, 3.0)
