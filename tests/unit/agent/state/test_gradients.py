"""Gradients that a loop goes on from are part of the state; those that it has used and throws away are not."""

import pytest
import torch

import holdfast
from holdfast.engine.training import Training
from holdfast.state.registry import Registry


class PlannedLoop:
    """A model under a loop whose iterations end where `plan` says."""

    def __init__(self, store, seed=0):
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.05)
        self.session = holdfast.Session(
            "job", store=store, model=self.model, optimizer=self.optimizer, every=1, keep=100
        )
        self.losses = {}

    def run(self, plan, until):
        self.session.resume()
        while self.session.iteration < until:
            plan(self, self.session.iteration + 1)
            self.session.step()
            self.session.wait(300)
        self.session._close("SIGKILL")
        return self.losses

    def backward(self, iteration):
        loss = self.model(torch.rand(3, 4)).square().mean()
        loss.backward()
        self.losses[iteration] = self.losses.get(iteration, 0) + loss.item()


def zeroes_last(loop, iteration):
    loop.backward(iteration)
    loop.optimizer.step()
    loop.optimizer.zero_grad()


def zeroes_first(loop, iteration):
    loop.optimizer.zero_grad()
    loop.backward(iteration)
    loop.optimizer.step()


def fills_with_zeros_first(loop, iteration):
    loop.optimizer.zero_grad(set_to_none=False)
    loop.backward(iteration)
    loop.optimizer.step()


def never_zeroes(loop, iteration):
    loop.backward(iteration)
    loop.optimizer.step()


def accumulates_across(loop, iteration):
    loop.backward(iteration)
    if iteration % 3 == 0:
        loop.optimizer.step()
        loop.optimizer.zero_grad()


def prepares_the_next(loop, iteration):
    loop.backward(iteration)
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    loop.backward(iteration)


PLANS = [
    zeroes_last,
    zeroes_first,
    fills_with_zeros_first,
    never_zeroes,
    accumulates_across,
    prepares_the_next,
]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("deaths", [[1, 12], [4, 5, 12], [6, 7, 8, 12]])
def test_every_way_to_treat_gradients_resumes_exactly(plan, deaths, tmp_path):
    expected = PlannedLoop(tmp_path / "alone").run(plan, 12)
    seen = {}
    for seed, death in enumerate(deaths):
        seen |= PlannedLoop(tmp_path / "killed", seed=seed).run(plan, death)
    assert seen == expected


def in_the_last_checkpoint(plan, store):
    loop = PlannedLoop(store)
    saved = []
    capture = loop.session._training.registry.capture

    def spy(*args, **options):
        found = capture(*args, **options)
        saved.append([name for name in found.tensors if ".grad." in name])
        return found

    loop.session._training.registry.capture = spy
    loop.run(plan, 4)
    return saved[-1]


@pytest.mark.parametrize("plan", PLANS)
def test_only_what_a_loop_goes_on_from_is_saved_under_its_parameters_names(plan, tmp_path):
    names = ["model.grad.0.weight", "model.grad.0.bias", "model.grad.2.weight", "model.grad.2.bias"]
    assert in_the_last_checkpoint(plan, tmp_path) == ([] if plan in (zeroes_last, zeroes_first) else names)


def test_where_no_checkpoint_is_expected_nothing_is_looked_at_and_all_is_kept(tmp_path):
    loop = PlannedLoop(tmp_path)
    gradients = loop.session._training.registry.gradients
    parameters = [("model", name, parameter) for name, parameter in loop.model.named_parameters()]
    loop.run(zeroes_first, 3)
    expected = True
    loop.session._training.around_updates(lambda: None, lambda: None, lambda: None, lambda _: expected)
    zeroes_first(loop, 4)
    assert gradients.pending(parameters) == []
    expected = False
    zeroes_first(loop, 5)
    assert gradients.pending(parameters) == parameters
    loop.session._training.close()


def test_going_back_takes_away_what_was_accumulated_since(tmp_path):
    loop = PlannedLoop(tmp_path)
    empty = loop.session._training.registry.capture({})
    loop.backward(1)
    Registry({"model": loop.model}).apply(empty.trees, empty.tensors)
    assert all(parameter.grad is None for parameter in loop.model.parameters())
    loop.session._close("SIGKILL")


def test_a_sparse_gradient_is_told_of_once_and_stops_no_checkpoint(caplog):
    model = torch.nn.Embedding(4, 2, sparse=True)
    registry = Registry({"model": model})
    model(torch.tensor([1])).sum().backward()
    for _ in range(2):
        assert "gradients" not in registry.capture({}).trees or not registry.capture({}).trees["gradients"]
    assert caplog.text.count("model.grad.weight is sparse") == 1


def test_memory_is_prepared_for_a_state_without_gradients(tmp_path):
    loop = PlannedLoop(tmp_path)
    loop.backward(1)
    training = loop.session._training
    assert isinstance(training, Training)
    assert "gradients" not in training.outline().trees
    assert "gradients" in training.capture().trees
    loop.session._close("SIGKILL")


def accumulates_now_and_then(loop, iteration):
    """After an update whose gradients all earlier iterations have thrown away."""
    if iteration not in (6, 9):
        loop.optimizer.zero_grad()
    loop.backward(iteration)
    loop.optimizer.step()


def test_a_loop_that_begins_to_reuse_gradients_is_reported_once_and_resumes_exactly_from_then_on(tmp_path, caplog):
    expected = PlannedLoop(tmp_path / "alone").run(accumulates_now_and_then, 12)
    assert caplog.text.count("The checkpoint between the two lacks them") == 1
    seen = PlannedLoop(tmp_path / "killed").run(accumulates_now_and_then, 8)
    seen |= PlannedLoop(tmp_path / "killed", seed=1).run(accumulates_now_and_then, 12)
    assert seen == expected


def test_a_loop_that_never_reuses_gradients_is_not_warned(tmp_path, caplog):
    PlannedLoop(tmp_path).run(zeroes_first, 6)
    assert "lacks them" not in caplog.text


def test_used_sparse_gradients_are_not_warned_of_where_no_checkpoint_is_expected(caplog):
    model = torch.nn.Sequential(torch.nn.Embedding(4, 2, sparse=True), torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    registry = Registry({"model": model, "optimizer": optimizer})
    for iteration in range(4):
        optimizer.zero_grad()
        model(torch.tensor([iteration])).sum().backward()
        registry.gradients.before_update(optimizer)
        optimizer.step()
        registry.gradients.after_update(optimizer, lambda: False)
    registry.capture({})
    assert "is sparse" not in caplog.text
    model(torch.tensor([1])).sum().backward()
    registry.capture({})
    assert "model.grad.0.weight is sparse" in caplog.text


@pytest.mark.parametrize("is_reused", [False, True])
def test_used_sparse_gradients_of_the_first_update_are_not_warned_of_unless_they_are_reused(is_reused, caplog):
    model = torch.nn.Sequential(torch.nn.Embedding(4, 2, sparse=True), torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    registry = Registry({"model": model, "optimizer": optimizer})
    for iteration in range(3):
        if not is_reused:
            optimizer.zero_grad()
        model(torch.tensor([iteration])).sum().backward()
        registry.gradients.before_update(optimizer)
        optimizer.step()
        registry.gradients.after_update(optimizer, lambda: True)
        registry.capture({})
    assert ("model.grad.0.weight is sparse" in caplog.text) is is_reused
    assert caplog.text.count("The checkpoint between the two lacks them") == is_reused
