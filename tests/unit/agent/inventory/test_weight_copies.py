"""Averages and copies of weights in variables of the script are named once; those that are saved are not."""

import copy
import functools
import gc
import weakref

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import holdfast

COPY = "an average or copy of weights that is in no checkpoint"


@pytest.fixture
def named(caplog, tmp_path):
    """Return a function that trains, and returns the paths of each report."""

    def run(make, every=1, iterations=9, **given):
        caplog.clear()
        model = torch.nn.Linear(2, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        update = make(model)
        given = {keyword: value(update) for keyword, value in given.items()}
        with holdfast.Session(
            "job", store=tmp_path, every=every, model=model, optimizer=optimizer, **given
        ) as session:
            session.resume()
            for _ in range(iterations):
                model(torch.ones(2)).sum().backward()
                optimizer.step()
                update()
                session.step()
                session.wait(60)  # a checkpoint that is being written would skip the next
        messages = [each.getMessage() for each in caplog.records if "training changes " in each.getMessage()]
        return [each.partition("training changes ")[2].partition(",")[0] for each in messages]

    return run


def copied(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def averaged_in_a_closure(model):
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    return lambda: ema.update_parameters(model)


def dict_in_a_closure(model):
    shadow = copied(model)

    def update():
        for name, value in model.state_dict().items():
            shadow[name].lerp_(value, 0.1)

    return update


def replaced_entries(model):
    shadow = copied(model)

    def update():
        for name, value in model.state_dict().items():
            shadow[name] = 0.9 * shadow[name] + 0.1 * value

    return update


def by_data(model):
    average = [each.detach().clone() for each in model.parameters()]

    def update():
        for mean, value in zip(average, model.parameters(), strict=True):
            mean.data.mul_(0.9).add_(value.data, alpha=0.1)

    return update


class WeightEMA:
    def __init__(self, model):
        self.model, self.weights = model, copied(model)

    def update(self):
        for name, value in self.model.state_dict().items():
            self.weights[name].lerp_(value, 0.1)

    def state_dict(self):
        return {name: value.clone() for name, value in self.weights.items()}

    def load_state_dict(self, state):
        self.weights = state


def bound_method(model):
    return WeightEMA(model).update


def in_an_object(model):
    class Holder:
        def __init__(self):
            self.ema_weights = copied(model)

        def __call__(self):
            for name, value in model.state_dict().items():
                self.ema_weights[name].lerp_(value, 0.1)

    return Holder()


def target_network(model):
    target = copy.deepcopy(model)
    calls = []

    def update():
        calls.append(1)
        if len(calls) % 4 == 0:
            target.load_state_dict(model.state_dict())

    return update


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (averaged_in_a_closure, "update.ema (AveragedModel)"),
        (dict_in_a_closure, "update.shadow (dict)"),
        (replaced_entries, "update.shadow (dict)"),
        (by_data, "update.average (list)"),
        (bound_method, "update (WeightEMA)"),
        (in_an_object, "update.ema_weights (dict)"),
        (target_network, "update.target (Linear)"),
    ],
)
def test_an_average_or_copy_in_a_variable_is_named_once(named, make, path):
    assert named(make) == [path]


def test_an_average_in_a_local_variable_is_named_once(caplog, tmp_path):
    model = torch.nn.Linear(2, 3)
    ema = copy.deepcopy(model)
    with holdfast.Session("job", store=tmp_path, every=2, model=model) as session:
        session.resume()
        for _ in range(9):
            with torch.no_grad():
                for mean, value in zip(ema.parameters(), model.parameters(), strict=True):
                    mean.lerp_(value + 1, 0.1)
            session.step()
    assert caplog.text.count(f"training changes ema (Linear), {COPY}") == 1


def unchanged(model):
    teacher = copy.deepcopy(model)
    return lambda: teacher(torch.ones(2))


def average_of_losses(model):
    ema = {"loss": torch.zeros(5)}
    return lambda: ema["loss"].add_(1.0)


def average_of_gradients(model):
    avg_grads = [torch.zeros_like(each) for each in model.parameters()]
    return lambda: [each.add_(1.0) for each in avg_grads]


def another_name(model):
    evaluated = copy.deepcopy(model)
    return lambda: evaluated.load_state_dict(model.state_dict())


def the_model_itself(model):
    target = model
    return lambda: target(torch.ones(2))


@pytest.mark.parametrize(
    "make", [unchanged, average_of_losses, average_of_gradients, another_name, the_model_itself]
)
def test_what_is_no_average_of_weights_is_not_named(named, make):
    assert named(make) == []


def the_function(update):
    return update.__closure__[0].cell_contents


@pytest.mark.parametrize(
    ("make", "given"),
    [
        (averaged_in_a_closure, {"average": the_function}),
        (bound_method, {"smoothed": lambda update: update.__self__}),
        (
            dict_in_a_closure,
            {"loop": lambda update: holdfast.Variables(shadow=update.__closure__[1].cell_contents)},
        ),
    ],
)
def test_an_average_that_is_saved_is_not_named(named, make, given):
    assert named(make, **given) == []


def test_what_is_found_is_not_kept(tmp_path):
    model = torch.nn.Linear(2, 3)
    ema = AveragedModel(model)
    freed = weakref.ref(ema)
    with holdfast.Session("job", store=tmp_path, every=1, model=model) as session:
        session.resume()
        for _ in range(4):
            update = functools.partial(ema.update_parameters, model)
            update()
            session.step()
        del ema, update
        session.step()
        gc.collect()
        assert freed() is None
