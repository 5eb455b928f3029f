"""Optimizers and schedulers that the script uses, and that no checkpoint holds, are reported once."""

import copy
import io
import itertools
import logging
import tempfile
import types

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

    def train(model, steps, every=100, **given):
        caplog.clear()
        with (
            caplog.at_level(logging.WARNING),
            holdfast.Session("job", store=tmp_path, every=every, model=model, **given) as session,
        ):
            for step in steps:
                model(torch.ones(2, 4)).sum().backward()
                step()
                session.step()
                session.wait(60)  # or a busy machine would decide which iterations have a checkpoint
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


class OptimizerByParameter:
    """Optimizers behind functions only, as those of Pyro: without `state_dict` and `zero_grad`."""

    def __init__(self, model):
        self.optimizers = {each: torch.optim.AdamW([each]) for each in model.parameters()}

    def get_state(self):
        return [each.state_dict() for each in self.optimizers.values()]

    def set_state(self, state):
        for each, saved in zip(self.optimizers.values(), state, strict=True):
            each.load_state_dict(saved)

    def __call__(self):
        for each in self.optimizers.values():
            each.step()


def in_closures(optimizers):
    class State:
        def state_dict(self):
            return {"optimizers": self.own_state()}

        def own_state(self):
            return optimizers.get_state()

        def load_state_dict(self, state):
            optimizers.set_state(state["optimizers"])

    return State()


def in_functions_of_attributes(optimizers):
    return types.SimpleNamespace(
        state_dict=lambda: dict(enumerate(optimizers.get_state())),
        load_state_dict=lambda state: optimizers.set_state(state.values()),
    )


class InAttribute:
    def __init__(self, optimizers):
        self.save, self.load = optimizers.get_state, optimizers.set_state

    def state_dict(self):
        return {"optimizers": self.save()}

    def load_state_dict(self, state):
        self.load(state["optimizers"])


class WithoutState:
    """A `state_dict` that leaves the optimizers out, though other methods use them."""

    def __init__(self, optimizers):
        self.step = lambda: optimizers()

    def state_dict(self):
        return {"iteration": 1}

    def load_state_dict(self, state): ...


@pytest.mark.parametrize("wrap", [in_closures, in_functions_of_attributes, InAttribute])
def test_optimizers_that_the_code_of_a_given_state_dict_names_are_not_missed(warned, model, wrap):
    optimizers = OptimizerByParameter(model)
    assert warned(model, [optimizers] * 4, parts=wrap(optimizers)) == []
    assert len(warned(model, [optimizers] * 4, parts=WithoutState(optimizers))) == 1
    other = OptimizerByParameter(model)
    assert len(warned(model, [other] * 4, parts=wrap(optimizers))) == 1


def learning_rate_of(optimizer):
    class State:
        def state_dict(self):
            return {"iteration": 1, "lr": optimizer.param_groups[0]["lr"]}

        def load_state_dict(self, state): ...

    return State()


def copies_of(optimizer):
    class State:
        def state_dict(self):
            return {"moments": [each["exp_avg"].clone() for each in optimizer.state.values()] * 2}

        def load_state_dict(self, state): ...

    return State()


def pickled(optimizer):
    class State:
        def state_dict(self):
            torch.save(optimizer.state_dict(), file := io.BytesIO())
            return {"optimizer": file.getvalue().hex()}

        def load_state_dict(self, state): ...

    return State()


@pytest.mark.parametrize(
    ("wrap", "kind", "number"),
    [
        (learning_rate_of, torch.optim.AdamW, 1), (learning_rate_of, torch.optim.SGD, 0),
        (copies_of, torch.optim.AdamW, 0), (pickled, torch.optim.AdamW, 0),
    ],
)  # fmt: skip
def test_an_optimizer_of_which_a_state_dict_only_reads_something_is_missed_once(warned, wrap, kind, number):
    model = torch.nn.Linear(4, 20)
    optimizer = kind(model.parameters())
    assert len(warned(model, [optimizer.step] * 8, every=2, parts=wrap(optimizer))) == number


def test_a_closed_session_no_longer_watches(warned, model):
    optimizer = torch.optim.AdamW(model.parameters())
    before = len(_global_optimizer_post_hooks)
    warned(model, [optimizer.step] * 2, optimizer=optimizer)
    assert len(_global_optimizer_post_hooks) == before


def reported(tmp_path, caplog, step, iterations=8, **given):
    """Return the reports of objects that nothing trains."""
    caplog.clear()
    with holdfast.Session("job", store=tempfile.mkdtemp(dir=tmp_path), every=10**6, **given) as session:
        session.resume()
        for _ in range(iterations):
            step()
            session.step()
    return [text for each in caplog.records if "which the session was not given" in (text := each.getMessage())]


def update(model, *optimizers):
    model(torch.ones(2, 4)).sum().backward()
    for each in optimizers:
        each.step()


KINDS = [torch.optim.SGD, torch.optim.AdamW]


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_and_an_optimizer_that_copies_replaced_are_reported_once(tmp_path, caplog, model, kind):
    optimizer = kind(model.parameters(), lr=0.1)
    copied = copy.deepcopy(model)
    other = kind(copied.parameters(), lr=0.1)
    (warning,) = reported(tmp_path, caplog, lambda: update(copied, other), model=model, optimizer=optimizer)
    assert "optimizer has made no step and no parameter of model has changed, but " in warning
    (warning,) = reported(tmp_path, caplog, lambda: update(copied, other), model=model)
    assert "no parameter of model has changed, but " in warning
    assert reported(tmp_path, caplog, lambda: update(copied, other), model=copied, optimizer=other) == []


@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_that_another_of_the_same_model_replaced_is_reported(tmp_path, caplog, model, kind):
    optimizer, other = (kind(model.parameters(), lr=0.1) for _ in range(2))
    (warning,) = reported(tmp_path, caplog, lambda: update(model, other), model=model, optimizer=optimizer)
    assert "optimizer has made no step, but " in warning


def test_a_replaced_model_of_another_shape_is_reported_later(tmp_path, caplog, model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    larger = torch.nn.Linear(4, 3)
    other = torch.optim.SGD(larger.parameters(), lr=0.1)
    given = {"model": model, "optimizer": optimizer}
    assert reported(tmp_path, caplog, lambda: update(larger, other), iterations=50, **given) == []
    assert len(reported(tmp_path, caplog, lambda: update(larger, other), iterations=120, **given)) == 1


def test_what_waits_or_is_frozen_is_not_reported(tmp_path, caplog, model):
    teacher, head = copy.deepcopy(model), torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    idle = torch.optim.SGD(teacher.parameters(), lr=0.1)
    probe = torch.optim.SGD(head.parameters(), lr=0.1)
    calls = itertools.count(1)

    def accumulate():
        update(head, probe)
        update(model, *([optimizer] if next(calls) % 8 == 0 else []))

    assert reported(tmp_path, caplog, accumulate, 120, model=model, optimizer=optimizer, teacher=teacher) == []
    both = {"generator": model, "optimizer": optimizer, "discriminator": teacher, "idle": idle}
    assert reported(tmp_path, caplog, lambda: update(model, optimizer), 120, **both) == []
    assert reported(tmp_path, caplog, lambda: None, 120, **both) == []  # a loss scale that is still too high
    adapted = torch.nn.Sequential(model, torch.nn.Linear(1, 1)).requires_grad_(False)
    adapted[1].requires_grad_(True)
    adapters = torch.optim.SGD(adapted[1].parameters(), lr=0.1)
    assert reported(tmp_path, caplog, lambda: update(adapted, adapters), 120, model=adapted) == []
