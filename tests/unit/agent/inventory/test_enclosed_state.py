"""Generators and state that only functions, caches, cycles and variables of the script refer to are named once."""

import copy
import functools
import itertools
import logging
import random

import numpy
import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import holdfast
from holdfast.inventory import changing_state
from holdfast.inventory.enclosed_state import changed_variables


class Part(torch.nn.Module):
    """A module with a function of the script as an attribute."""

    def __init__(self, function):
        super().__init__()
        self.function = function


@pytest.fixture
def warned(caplog, tmp_path, monkeypatch):
    """Return a function that trains with a function of the script, and returns the warnings."""
    monkeypatch.setattr(changing_state, "SLICE_SECONDS", 60.0)
    monkeypatch.setattr(changing_state, "START_SECONDS", 60.0)

    def run(call, iterations=14, model=None, **given):
        caplog.clear()
        model = torch.nn.Linear(2, 1) if model is None else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        given = {name: make(optimizer) if name == "scheduler" else make for name, make in given.items()}
        with holdfast.Session(
            "job", store=tmp_path, every=1, model=model, optimizer=optimizer, **given
        ) as session:
            session.resume()
            for _ in range(iterations):
                optimizer.step()
                call()
                session.step()
                if (comparing := session._training._watch._changing._comparing) is not None:
                    comparing.result()
        messages = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
        return [each for each in messages if "while they were copied" not in each]

    return run


def drawing(make, draw):
    own = make()
    return lambda: draw(own)


GENERATORS = {
    "torch": (lambda: torch.Generator(), lambda g: torch.rand(1, generator=g)),
    "numpy": (lambda: numpy.random.default_rng(1), lambda g: g.normal()),
    "old numpy": (lambda: numpy.random.RandomState(1), lambda g: g.normal()),
    "python": (lambda: random.Random(1), lambda g: g.random()),
}


def in_closure(kind):
    return drawing(*GENERATORS[kind])


def in_partial(kind):
    make, draw = GENERATORS[kind]
    return functools.partial(draw, make())


def in_keyword_of_partial(kind):
    make, draw = GENERATORS[kind]
    return functools.partial(lambda *, source: draw(source), source=make())


def in_cached_function(kind):
    make, draw = GENERATORS[kind]
    source = functools.lru_cache(lambda: make())
    source()
    return lambda: draw(source())


def in_cycle(kind):
    make, draw = GENERATORS[kind]
    own = itertools.cycle([make()])
    return lambda: draw(next(own))


def in_default(kind):
    make, draw = GENERATORS[kind]
    source = make()
    return lambda own=source: draw(own)


PLACES = [in_closure, in_partial, in_keyword_of_partial, in_cached_function, in_cycle, in_default]


@pytest.mark.parametrize("kind", GENERATORS)
@pytest.mark.parametrize("place", PLACES)
def test_a_generator_that_a_function_of_a_given_object_reaches_is_named_once(warned, place, kind):
    held = [place(kind)]
    model = torch.nn.Sequential(Part(held[0]), torch.nn.Linear(2, 1))
    (message,) = warned(lambda: held[0](), model=model)
    assert "training changes model.0.function" in message
    assert "Session(generator=...)" in message


@pytest.mark.parametrize("kind", GENERATORS)
@pytest.mark.parametrize("place", PLACES)
def test_a_generator_that_a_variable_of_the_script_reaches_is_named_once(warned, place, kind):
    noise = place(kind)
    (message,) = warned(noise)
    assert "each iteration draws from call" in message or "each iteration draws from noise" in message


def test_a_generator_of_a_hook_is_named(warned):
    model, noise = torch.nn.Linear(2, 1), in_closure("torch")
    model.register_forward_hook(lambda *_: noise() * 0)
    (message,) = warned(lambda: model(torch.ones(2)), model=model)
    assert "model._forward_hooks.noise.own" in message


def counting_average():
    calls = 0

    def average(averaged, current, count):
        nonlocal calls
        calls += 1
        return averaged + (current - averaged) / (1 + calls)

    return average


def averaging_by(momentum):
    def average(averaged, current, count):
        momentum["value"] = 0.5 * momentum["value"] + 0.1
        return averaged + (current - averaged) * momentum["value"]

    return average


@pytest.mark.parametrize(
    ("function", "path"),
    [(counting_average(), "ema.avg_fn.calls"), (averaging_by({"value": 1.0}), "ema.avg_fn.momentum")],
)
def test_the_state_of_the_function_of_an_average_is_named(warned, function, path):
    model = torch.nn.Linear(2, 1)
    ema = AveragedModel(model, avg_fn=function)
    (message,) = warned(lambda: ema.update_parameters(model), model=model, ema=ema)
    assert f"training changes {path}" in message


def test_the_counter_of_the_function_of_a_schedule_is_named(warned):
    calls = 0

    def warm_up(epoch):
        nonlocal calls
        calls += 1
        return min(1.0, calls / 10)

    schedules = []

    def make(optimizer):
        schedules.append(torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up))
        return schedules[0]

    (message,) = warned(lambda: schedules[0].step(), scheduler=make)
    assert "training changes scheduler.lr_lambdas[0].calls" in message


def test_the_place_of_a_cycle_of_a_given_object_is_named(warned):
    model = torch.nn.Sequential(Part(itertools.cycle([1.0, 0.5, 0.25, 0.1, 0.0])), torch.nn.Linear(2, 1))
    (message,) = warned(lambda: next(model[0].function), model=model)
    assert "training changes model.0.function.place" in message


def test_an_average_of_weights_in_a_variable_is_named_once(warned):
    model = torch.nn.Linear(2, 1)
    averages = [AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))]
    ema = averages[0]
    (message,) = warned(lambda: ema.update_parameters(model), model=model)
    assert "(AveragedModel), an average of weights that is in no checkpoint" in message


class WeightEMA:
    def __init__(self, model):
        self.shadow = copy.deepcopy(model.state_dict())

    def update(self, model):
        for name, value in model.state_dict().items():
            self.shadow[name].lerp_(value, 0.1)


def test_an_average_that_the_script_computes_is_named(warned):
    model = torch.nn.Linear(2, 1)
    weights = WeightEMA(model)
    (message,) = warned(lambda: weights.update(model), model=model)
    assert "weights (WeightEMA), an average of weights" in message


def quiet_cases():
    model = torch.nn.Linear(2, 1)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    yield "a given average", lambda: ema.update_parameters(model), {"model": model, "ema": ema}

    source = torch.Generator()
    noise = functools.partial(torch.rand, 1, generator=source)
    yield "a given generator", noise, {"generator": source}

    seeded, numbers = torch.Generator(), itertools.count()
    yield "a seed for each iteration", lambda: torch.rand(1, generator=seeded.manual_seed(next(numbers))), {}

    rare, calls = torch.Generator(), itertools.count()
    yield "an evaluation", lambda: torch.rand(1, generator=rare) if next(calls) % 2 else None, {}

    activations, batches = {}, []
    hooked = torch.nn.Linear(2, 1)
    hooked.register_forward_hook(
        lambda module, args, output: activations.update(last=output.detach() + next(calls))
    )
    yield "results of a hook", lambda: hooked(torch.rand(1, 2)), {"model": hooked}

    kept = torch.nn.Sequential(Part(lambda: batches.append(1)), torch.nn.Linear(2, 1))
    yield "a list of results", kept[0].function, {"model": kept}

    held = torch.nn.BatchNorm1d(2)
    mean = held.running_mean
    model_with = torch.nn.Sequential(held, Part(lambda: mean.sum()))
    yield "a buffer of the model", lambda: held(torch.rand(4, 2)), {"model": model_with}

    variables = holdfast.Variables(shadow={"weight": torch.zeros(2)})
    ema_weights = variables.shadow
    yield "an average in Variables", lambda: ema_weights["weight"].add_(1.0), {"loop": variables}


@pytest.mark.parametrize(("call", "given"), [pytest.param(*each[1:], id=each[0]) for each in quiet_cases()])
def test_what_is_saved_or_carries_nothing_on_is_not_named(warned, call, given):
    assert warned(call, **given) == []


def test_a_generator_of_a_loader_is_not_named_as_a_variable(caplog, tmp_path):
    source = torch.Generator()

    def collate(samples):
        return torch.stack(samples) + torch.rand(1, generator=source)

    model = torch.nn.Linear(2, 1)
    for make in (holdfast.DataLoader, torch.utils.data.DataLoader):
        loader = make(torch.rand(32, 2), batch_size=2, collate_fn=collate)
        with holdfast.Session(make.__module__, store=tmp_path, model=model) as session:
            for _ in session.batches(loader):
                session.step()
    assert not [each for each in caplog.records if "draws from" in each.getMessage()]


def test_variables_that_are_only_counted_are_not_used():
    def outer():
        counted = used = 0

        def count():
            nonlocal counted, used
            counted += 1
            used += 1
            return used

        return count

    assert changed_variables(outer().__code__) == {"used"}
