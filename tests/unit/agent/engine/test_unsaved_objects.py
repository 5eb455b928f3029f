"""Optimizers and schedulers that the script uses, and that no checkpoint holds, are reported once."""

import logging

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_post_hooks

import holdfast

SCHEDULES = torch.optim.lr_scheduler


class Schedule:
    """A scheduler that is not torch's."""

    def __init__(self, optimizer):
        self.inside = SCHEDULES.StepLR(optimizer, 2)

    def state_dict(self):
        return self.inside.state_dict()

    def load_state_dict(self, state_dict):
        self.inside.load_state_dict(state_dict)


@pytest.fixture
def warned(tmp_path, caplog):
    """A function that trains with some objects given to the session, and returns the warnings about others."""

    def train(model, steps, **given):
        caplog.clear()
        with (
            caplog.at_level(logging.WARNING),
            holdfast.Session("job", store=tmp_path, every=100, model=model, **given) as session,
        ):
            for step in steps:
                model(torch.ones(2, 4)).sum().backward()
                step()
                session.step()
        return [text for each in caplog.records if "is in no checkpoint" in (text := each.getMessage())]

    return train


@pytest.fixture
def model():
    return torch.nn.Linear(4, 1)


def test_one_optimizer_for_each_parameter_is_one_warning(warned):
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(30)))
    optimizers = [torch.optim.AdamW([parameter]) for parameter in model.parameters()]

    def step():
        for each in optimizers:
            each.step()

    assert len(warned(model, [step] * 3)) == 1


def test_an_optimizer_of_a_given_module_is_missed_once(warned, model):
    optimizer = torch.optim.AdamW(model.parameters())
    (warning,) = warned(model, [optimizer.step] * 4)
    assert warning.endswith(
        "AdamW trains parameters of 'model' but is in no checkpoint: a resume resets its moments and learning "
        "rate. Give it to the session, Session(optimizer=...)"
    )
    assert warned(model, [optimizer.step] * 4, optimizer=optimizer) == []


def test_the_scheduler_of_an_optimizer_is_missed(warned, model):
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = SCHEDULES.StepLR(optimizer, 2)

    def step():
        optimizer.step()
        scheduler.step()

    steps = [step] * 4
    (warning,) = warned(model, steps, optimizer=optimizer)
    assert warning.endswith(
        "an LR scheduler changes the learning rate of AdamW but is in no checkpoint: a resume resets "
        "it. Give it to the session, Session(scheduler=...)"
    )
    assert len(warned(model, steps)) == 2
    assert warned(model, steps, optimizer=optimizer, scheduler=scheduler) == []
    assert warned(model, steps, optimizer=optimizer, scheduler=Schedule(optimizer)) == []
    other = SCHEDULES.StepLR(torch.optim.SGD(model.parameters()), 2)
    assert len(warned(model, steps, optimizer=optimizer, other_optimizer=other.optimizer, scheduler=other)) == 1


def test_an_optimizer_with_nothing_to_lose_is_not_missed(warned, model):
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    elsewhere = torch.optim.AdamW(torch.nn.Linear(4, 4).parameters())
    assert warned(model, [plain.step, elsewhere.step] * 3) == []
    # one that is made in each iteration keeps nothing that a resume could lose
    kept = [torch.optim.AdamW(model.parameters()) for _ in range(4)]
    assert warned(model, [each.step for each in kept]) == []


def test_an_optimizer_inside_a_given_one_is_not_missed(warned, model):
    class Lookahead(torch.optim.SGD):
        def __init__(self, inside):
            super().__init__(inside.param_groups, lr=0.1)
            self.inside = inside

        def step(self, closure=None):
            self.inside.step()

    outer = Lookahead(torch.optim.AdamW(model.parameters()))
    assert warned(model, [outer.step] * 3, optimizer=outer) == []


def test_a_closed_session_no_longer_watches(warned, model):
    optimizer = torch.optim.AdamW(model.parameters())
    before = len(_global_optimizer_post_hooks)
    warned(model, [optimizer.step] * 2, optimizer=optimizer)
    assert len(_global_optimizer_post_hooks) == before
