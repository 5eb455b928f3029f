"""What a session was not given is told, once, with the keyword to give it under."""

import logging
import random
import re
from unittest.mock import Mock

import numpy
import pytest
import torch

import holdfast
from holdfast.inventory.missing_state import missing, objects_referred_to, optimizers_in_code
from tests.support.wrapped_optimizers import Delegating, Lookahead


def parts():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


class Looped:
    """A script's own trainer, with things it holds."""

    def __init__(self, **held):
        self.__dict__.update(held)

    def state_dict(self):
        return {}

    def load_state_dict(self, state_dict): ...


def test_a_session_that_was_given_everything_hears_nothing():
    model, optimizer = parts()
    schedules = torch.optim.lr_scheduler
    schedule = schedules.SequentialLR(
        optimizer, [schedules.ConstantLR(optimizer), schedules.ExponentialLR(optimizer, 0.9)], milestones=[2]
    )
    ema, loader = torch.optim.swa_utils.AveragedModel(model), holdfast.DataLoader(range(4))
    given = {"model": model, "optimizer": optimizer, "schedule": schedule, "ema": ema, "loader": loader}
    assert missing(given) == []


def test_the_optimizer_of_a_schedule_is_missed():
    model, optimizer = parts()
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    (told,) = missing({"model": model, "schedule": schedule})
    assert told.startswith("schedule.optimizer (SGD) is in no checkpoint: add it to the session, ")
    assert "Session(optimizer=...)" in told


def test_what_an_optimizer_trains_outside_every_module_is_missed():
    model, optimizer = parts()
    image = torch.nn.Parameter(torch.zeros(3, 5))
    optimizer.add_param_group({"params": [image]})
    (told,) = missing({"model": model, "optimizer": optimizer})
    assert "optimizer trains 1 tensors, the first of shape (3, 5), that are in no module" in told
    loop = holdfast.Variables(images=[{"one": image}])
    assert missing({"model": model, "optimizer": optimizer, "loop": loop}) == []


@pytest.mark.parametrize(
    ("made", "keyword"),
    [
        (torch.Generator, "generator"),
        (numpy.random.default_rng, "generator"),
        (lambda: torch.nn.Linear(2, 2), "model"),
        (lambda: torch.optim.SGD([torch.zeros(1)]), "optimizer"),
    ],
)
@pytest.mark.parametrize("hide", [lambda held: held, lambda held: [held], lambda held: {"a": (held,)}])
def test_what_hides_in_an_object_or_a_module_is_missed(made, keyword, hide):
    held = made()
    for item, path in ((Looped(it=hide(held)), "item.it"), (torch.nn.Sequential(torch.nn.ReLU()), "item.0.it")):
        if isinstance(item, torch.nn.Module):
            item[0].it = [hide(held)]  # a module in an attribute would be part of the model
        (told,) = missing({"item": item})
        assert told.startswith(path)
        assert f"Session({keyword}=...)" in told
        assert not [each for each in missing({"item": item, "other": held}) if each.startswith("item")]


def follow(objects, message):
    """The objects, with the one that a message asks for under the keyword that it names."""
    keyword, path, name = re.match(r"(\w+)(\S*) \(\w+\) is in no checkpoint: .*Session\((\w+)=", message).groups()
    assert name not in objects
    return {**objects, name: eval(f"item{path}", {"item": objects[keyword]})}


@pytest.mark.parametrize("wrap", [lambda optimizer: optimizer, Delegating, Lookahead])
def test_what_a_message_asks_for_can_be_added(wrap, tmp_path):
    model, optimizer = parts()
    wrapped = wrap(optimizer)
    trainer = Looped(
        schedule=torch.optim.lr_scheduler.ExponentialLR(wrapped, 0.9),
        teacher=torch.nn.Linear(2, 2),
        noise=[torch.Generator(), numpy.random.default_rng(), numpy.random.RandomState(), random.Random()],
    )
    objects = {"model": model, "trainer": trainer}
    followed = 0
    while messages := missing(objects):
        objects = follow(objects, messages[0])
        followed += 1
    assert followed == 6
    with holdfast.Session("job", store=tmp_path, every=1, **objects) as session:
        model(torch.ones(2, 4)).sum().backward()
        wrapped.step()
        session.step()
    with holdfast.Session("job", store=tmp_path, **objects) as session:
        assert session.resume() == 1


def test_a_session_without_objects_is_reported():
    (message,) = missing({})
    assert "was given no objects" in message
    assert "Session(model=..., optimizer=...)" in message


def test_a_part_a_wrapper_and_a_stateless_module_are_not_missed():
    model, _ = parts()
    trainer = Looped(
        part=model[0],
        compiled=torch.nn.ModuleDict({"_orig_mod": model}),
        criterion=torch.nn.MSELoss(),
        itself=model,
    )
    assert missing({"model": model, "trainer": trainer}) == []


def test_data_is_not_looked_through():
    class Data(list):
        def __iter__(self):
            raise AssertionError("a million samples were looked at")

    trainer = Looped(samples=Data(range(2000)), few=[torch.Generator()])
    (told,) = missing({"trainer": trainer})
    assert told.startswith("trainer.few[0] (Generator)")


def test_each_is_told_once_and_what_a_checkpoint_holds_beyond_is_too(tmp_path, caplog):
    model, optimizer = parts()

    def session(**objects):
        return holdfast.Session("job", store=tmp_path, every=1, model=model, **objects)

    first = session(optimizer=optimizer, plan=holdfast.Variables(a=1))
    first.step()
    first.close()
    caplog.clear()
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    with caplog.at_level(logging.WARNING):
        second = session(optimizer=optimizer)
        second.resume()
        second.resume()
        second._close("SIGKILL")
    told = [r.getMessage() for r in caplog.records if "was not given" in r.getMessage()]
    assert len(told) == 1
    assert "the checkpoint holds 'plan', which the session was not given: add it, or its state is lost" in told[0]
    caplog.clear()
    third = holdfast.Session("other", store=tmp_path, model=model, schedule=schedule)
    third.resume()
    third._close("SIGKILL")
    assert caplog.text.count("schedule.optimizer (SGD) is in no checkpoint") == 1


LOG = Mock(spec=list)
"""Says that its class is `list`, and has none of the entries."""


class NamesProxy(torch.nn.Linear):
    def state_dict(self, *arguments, **named):
        LOG.append(1)
        return super().state_dict(*arguments, **named)


def test_a_proxy_with_the_class_of_a_container_is_no_container():
    module = NamesProxy(2, 2)
    module.log = LOG
    assert list(missing({"model": module})) == []
    assert list(optimizers_in_code({"model": module})) == []
    assert [each for each in objects_referred_to({"model": module}) if each is LOG]
