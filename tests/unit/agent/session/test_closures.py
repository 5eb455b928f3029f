"""Optimizers that run the forward and the backward pass in a closure."""

import threading

import pytest
import torch

import holdfast
from holdfast.checkpoint.restore import load
from holdfast.save.copying import HostCopies
from holdfast.store import open_store


class SharpnessAware(torch.optim.SGD):
    """Moves the parameters, evaluates the closure there, and moves on: as SAM does."""

    def step(self, closure):
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.add_(1.0)
        closure()
        return super().step()


@pytest.fixture
def copies_wait(monkeypatch):
    """Hold copies back until the event is set, or until a tenth of a second has passed."""
    real, may_copy = HostCopies.run, threading.Event()

    def run(copies):
        may_copy.wait(0.1)
        real(copies)

    monkeypatch.setattr(HostCopies, "run", run)
    return may_copy


class Loop:
    def __init__(self, store, optimizer, by_name=False):
        torch.manual_seed(1)
        self.model, self.by_name = torch.nn.Linear(4, 4), by_name
        self.optimizer = optimizer(self.model.parameters(), lr=0.1)
        self.session = holdfast.Session("m", store=store, every=1, model=self.model, optimizer=self.optimizer)
        self.session.resume()
        self.steps = []

    def iterate(self):
        self.steps.append([])
        settled = self.session._saver.snapshots
        wait = settled.wait_copied

        def noted():
            self.steps[-1].append("wait")
            return wait()

        def closure():
            self.steps[-1].append("forward")
            self.optimizer.zero_grad()
            loss = self.model(torch.ones(2, 4)).square().sum()
            loss.backward()
            return loss

        settled.wait_copied = noted
        self.optimizer.step(closure=closure) if self.by_name else self.optimizer.step(closure)
        settled.wait_copied = wait
        self.session.wait(300)
        before = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.session.step()
        return before


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.LBFGS])
def test_the_copy_overlaps_with_the_closure(tmp_path, optimizer, by_name, copies_wait):
    loop = Loop(tmp_path, optimizer, by_name)
    states = [loop.iterate() for _ in range(4)]
    assert all(step[:2] == ["forward", "wait"] for step in loop.steps)
    loop.session.close()
    store = open_store(tmp_path)
    checkpoints = store.checkpoints("m")
    assert len(checkpoints) > 1
    for checkpoint in checkpoints:
        stored = load(store, "m", checkpoint, rank=0).tensors
        for name, value in states[int(checkpoint.split("-")[0]) - 1].items():
            assert torch.equal(stored[f"model.{name}"], value)


def test_an_optimizer_that_moves_parameters_before_its_closure_tears_one_copy_only(tmp_path, copies_wait, caplog):
    loop = Loop(tmp_path, SharpnessAware)
    for _ in range(6):
        loop.iterate()
    loop.session.close()
    assert caplog.text.count("taken again at once") == 1
    assert "used gradients of the previous update" not in caplog.text
    assert [step[0] for step in loop.steps] == ["forward"] * 2 + ["wait"] * 4


def test_weights_that_change_after_each_boundary_tear_two_copies_only(tmp_path, copies_wait, caplog):
    loop = Loop(tmp_path, torch.optim.SGD)
    states = {}
    for iteration in range(1, 9):
        states[iteration] = loop.iterate()
        with torch.no_grad():
            loop.model.weight.mul_(1.5)  # as the swap of weights around an evaluation
    loop.session.close()
    warnings = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert [text.rpartition("; ")[2][:25] for text in warnings] == [
        "taken again at once",
        "from now on training wait",
    ]
    store = open_store(tmp_path)
    taken = [int(checkpoint.split("-")[0]) for checkpoint in store.checkpoints("m")]
    assert taken[-4:] == [5, 6, 7, 8]
    for iteration, checkpoint in zip(taken, store.checkpoints("m"), strict=True):
        stored = load(store, "m", checkpoint, rank=0).tensors
        assert torch.equal(stored["model.weight"], states[iteration]["weight"])
