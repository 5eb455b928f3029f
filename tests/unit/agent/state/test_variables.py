import collections
import copy
import enum
import math

import numpy
import pytest
import torch

import holdfast
from holdfast.state.registry import Registry


def test_values_are_read_and_assigned_as_attributes():
    loop = holdfast.Variables(best=math.inf, batch=None)
    loop.best, loop.place = 1.5, 7
    assert loop.state_dict() == {"best": 1.5, "batch": None, "place": 7}
    assert repr(loop) == "Variables(best=1.5, batch=None, place=7)"
    assert copy.deepcopy(loop).state_dict() == loop.state_dict()


def test_a_checkpoint_takes_back_what_was_assigned_since_and_keeps_what_it_does_not_know():
    before = holdfast.Variables(best=2.0)
    before.batch = torch.ones(2)
    state = dict(before.state_dict())
    loop = holdfast.Variables(best=math.inf, new_in_this_version=3)
    loop.undone = 1
    loop.load_state_dict(state)
    assert loop.best == 2.0
    assert loop.batch.tolist() == [1, 1]
    assert loop.new_in_this_version == 3
    with pytest.raises(AttributeError, match=r"Variables has no 'undone'; it has .*best"):
        loop.undone  # noqa: B018


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 2**80, -math.inf, 1 + 2j, "text", b"bytes"),
        *([1, [2.5]], (1, (2,)), {1, 2}, frozenset("a"), {"a": {1: None, (1, 2): 3}}),
        *(collections.OrderedDict(a=1), collections.Counter("aab"), collections.deque([1, 2], maxlen=3)),
        *(torch.Size([2, 3]), torch.float16, torch.device("cpu"), numpy.float32(2.5), numpy.float64(2.5)),
    ],
    ids=repr,
)
def test_a_value_of_each_kind_comes_back_as_it_was(value):
    before, after = Registry({"loop": holdfast.Variables(value=value)}), holdfast.Variables()
    captured = before.capture({})
    Registry({"loop": after}).apply(captured.trees, captured.tensors)
    assert after.value == value
    assert type(after.value) is type(value)


def test_tensors_and_arrays_come_back_without_their_graph(caplog):
    loop = holdfast.Variables(hidden=(torch.ones(2, requires_grad=True) * 2, None), array=numpy.arange(3))
    captured, after = Registry({"loop": loop}).capture({}), holdfast.Variables()
    Registry({"loop": after}).apply(captured.trees, captured.tensors)
    assert after.hidden[0].tolist() == [2, 2]
    assert after.hidden[0].grad_fn is None
    assert "loop.hidden.0 has a gradient graph" in caplog.text
    assert after.hidden[1] is None
    assert after.array.tolist() == [0, 1, 2]


def test_a_value_that_cannot_be_saved_is_named_and_training_goes_on(tmp_path, caplog):
    with pytest.raises(TypeError, match=r"loop\.value: cannot store a builtins\.object"):
        holdfast.Session("job", store=tmp_path, loop=holdfast.Variables(value=object()))
    loop = holdfast.Variables(value=1)
    with holdfast.Session("job", store=tmp_path, every=1, loop=loop) as session:
        loop.value = object()
        session.step()
        assert "loop.value: cannot store a builtins.object" in caplog.text
        loop.value = 2
        session.step()
    assert session.iteration == 2
    again = holdfast.Variables()
    with holdfast.Session("job", store=tmp_path, loop=again) as session:
        assert session.resume() == 2
    assert again.value == 2


@pytest.mark.parametrize("name", ["state_dict", "load_state_dict", "_declared"])
def test_a_name_that_it_needs_itself_is_refused(name):
    with pytest.raises(ValueError, match="this name is reserved"):
        holdfast.Variables(**{name: 1})


class PlainEnum(enum.Enum):
    WARM = "warm"


def test_a_member_of_an_enum_is_refused_when_the_session_is_made(tmp_path):
    with pytest.raises(TypeError, match=r"loop\.phase: cannot store the enum member PlainEnum\.WARM"):
        holdfast.Session("job", store=tmp_path, loop=holdfast.Variables(phase=PlainEnum.WARM))


def test_half_a_surrogate_pair_is_stored_wherever_it_stands(tmp_path):
    half = "\ud800"

    def resumed():
        loop = holdfast.Variables()
        session = holdfast.Session("job", store=tmp_path, every=1, loop=loop)
        session.resume()
        return loop, session

    loop, session = resumed()
    with session:
        loop.values = {half: half, "tensor": {half: torch.ones(2)}}
        session.step()
    loop, session = resumed()
    with session:
        assert session.iteration == 1
        assert loop.values[half] == half
        assert loop.values["tensor"][half].tolist() == [1, 1]


def test_training_with_state_in_variables_goes_on_as_if_it_had_not_stopped(tmp_path):
    """Layers unfrozen once, one history under two names, a parameter that only the optimizer knows."""

    def train(store, until, after=lambda session: None):
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)).requires_grad_(False)
        model[1].requires_grad_()
        loop = holdfast.Variables(scale=torch.nn.Parameter(torch.ones(1)), history=[0.0])
        loop.recent = loop.history
        optimizer = torch.optim.Adam([*model.parameters(), loop.scale], lr=0.1)
        losses = []
        with holdfast.Session("job", store=store, every=1, model=model, optimizer=optimizer, loop=loop) as session:
            session.resume()
            while session.iteration < until:
                if session.iteration == 2:
                    model.requires_grad_()
                optimizer.zero_grad()
                loss = (model(torch.randn(3, 4)) * loop.scale - sum(loop.recent)).square().mean()
                loss.backward()
                optimizer.step()
                loop.history.append(loss.item() / 4)
                losses.append(loss.item())
                session.step()
        return losses

    whole = train(tmp_path / "whole", 8)
    assert train(tmp_path / "parts", 4) + train(tmp_path / "parts", 8) == whole


def test_a_teacher_made_under_inference_mode_resumes(tmp_path):
    def resumed():
        with torch.inference_mode():
            teacher = torch.nn.Linear(2, 2)
        student = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(student.parameters())
        session = holdfast.Session(
            "job", store=tmp_path, every=1,
            teacher=teacher, student=student, optimizer=optimizer,
        )  # fmt: skip
        session.resume()
        return teacher, student, optimizer, session

    weights = []
    for iteration in range(3):
        teacher, student, optimizer, session = resumed()
        with session:
            assert session.iteration == iteration
            weights.append(teacher.weight.clone())
            student(teacher(torch.ones(1, 2)).clone()).sum().backward()
            optimizer.step()
            session.step()
    assert torch.equal(weights[0], weights[2])
