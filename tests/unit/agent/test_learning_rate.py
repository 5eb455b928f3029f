"""A learning rate that operators scale, and gradients that they clip."""

import sys

import pytest
import torch

import holdfast
from holdfast.learning_rate import GradientClip
from holdfast.protocol.values import ValueChange, ValueReport
from holdfast.protocol.wire import Desired
from tests.support.session_fixtures import linked as linked
from tests.support.session_fixtures import store as store


class ScaledJob:
    """A job whose learning rate can be scaled, and which notes the rate of each update."""

    def __init__(self, store, *, rate=0.5, scaled_first=False, **options):
        torch.manual_seed(0)
        self.model = torch.nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=rate)
        if scaled_first:
            holdfast.scale_learning_rate(self.optimizer)
        self.session = holdfast.Session("job", store=store, model=self.model, optimizer=self.optimizer, **options)
        if not scaled_first:
            holdfast.scale_learning_rate(self.optimizer)
        self.session.resume()

    def step(self):
        """Train one iteration; return by what part of the gradient the weights changed."""
        with torch.no_grad():
            self.model.weight.zero_()
        self.optimizer.zero_grad()
        self.model(torch.ones(1, 2)).sum().backward()
        self.optimizer.step()
        self.session.step()
        return round(-self.model.weight[0, 0].item(), 5)

    def want(self, value, name="lr_scale"):
        change = ValueChange(id=f"{name} {value}", name=name, value=value, lineage=1)
        self.session._reporter.link.desired = Desired(version=int(10 * value), values=(change,))

    def until(self, rate):
        while self.step() != rate:
            assert self.session.iteration < 100_000


@pytest.mark.parametrize("scaled_first", [False, True])
def test_the_step_uses_the_scaled_rate_and_all_else_sees_the_scripts(linked, store, scaled_first):
    job = ScaledJob(store, scaled_first=scaled_first, **linked)
    assert job.step() == 0.5
    job.want(0.1)
    job.until(0.05)
    assert job.optimizer.param_groups[0]["lr"] == 0.5
    job.session.checkpoint()
    job.step()
    job.session.close()
    again = ScaledJob(store, **linked)
    assert again.optimizer.param_groups[0]["lr"] == 0.5
    assert again.step() == 0.05
    again.session.close()


def test_a_rate_in_a_tensor_is_not_changed_in_place(linked, store):
    rate = torch.tensor(0.5)
    job = ScaledJob(store, rate=rate, **linked)
    job.step()
    job.want(0.1)
    job.until(0.05)
    assert job.optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.5
    job.session.close()


def test_a_step_that_raises_leaves_the_scripts_rate(linked, store, monkeypatch):
    job = ScaledJob(store, **linked)
    job.step()
    job.want(0.1)
    job.until(0.05)

    def closure():
        raise KeyError("a fault of the script")

    with pytest.raises(KeyError):
        job.optimizer.step(closure)
    job.session.step()
    assert job.optimizer.param_groups[0]["lr"] == 0.5
    job.session.close()


def test_an_optimizer_without_a_session_trains_as_before():
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    holdfast.scale_learning_rate(optimizer)
    model(torch.ones(1, 1)).sum().backward()
    before = model.weight.item()
    optimizer.step()
    assert round(before - model.weight.item(), 5) == 0.5


def test_the_norm_of_gradients_is_a_value_with_a_bound_above_the_scripts(linked, store):
    job = ScaledJob(store, **linked)
    clip = GradientClip(job.session)
    assert clip.value(5.0) == 5.0
    assert clip.value(float("inf")) == float("inf")
    (report,) = (
        each for each in job.session._reporter.link.of(ValueReport) if each.definition.name == "grad_clip"
    )
    assert (report.definition.low, report.definition.high) == (0.0, 50.0)
    job.session.close()


def test_a_norm_that_is_not_meant_to_clip_is_left_as_it_is(linked, store):
    job = ScaledJob(store, **linked)
    assert GradientClip(job.session).value(sys.float_info.max) == sys.float_info.max
    assert GradientClip(job.session).value(float("inf")) == float("inf")
    job.session.close()
