"""What a script hands to a session that is not what it means."""

import logging
import pathlib
import re
import traceback

import pytest
import torch

import holdfast
from tests.support.small_session import iterate, session_of


def net():
    return torch.nn.Linear(2, 2)


@pytest.mark.parametrize("name", ["policy", "token", "labels", "keep", "mtbf", "debug", "owner", "store"])
@pytest.mark.parametrize(
    "make", [net, lambda: torch.optim.SGD(net().parameters()), holdfast.Variables, torch.Generator]
)
def test_an_object_under_the_name_of_a_setting_is_refused_with_the_way_out(tmp_path, name, make):
    with pytest.raises(
        TypeError, match=rf'{name} is a setting, and \w+ is an object .*state=\{{"{name}": \.\.\.\}}'
    ):
        holdfast.Session("rl", **{"store": tmp_path} | {name: make()})


def test_objects_under_the_names_of_settings_are_saved_and_come_back(tmp_path):
    def session(policy, value):
        return holdfast.Session("rl", store=tmp_path, state={"policy": policy, "self": value})

    policy, value = net(), net()
    with session(policy, value) as first:
        first.resume()
        first.step()
    again = net(), net()
    with session(*again) as second:
        assert second.resume() == 1
    assert torch.equal(again[0].weight, policy.weight)
    assert torch.equal(again[1].weight, value.weight)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"budgt": "2%"}, TypeError, r"Session\(budgt='2%'\): did you mean budget="),
        ({"stores": pathlib.Path("a")}, TypeError, r"did you mean store="),
        ({"seed": 3}, TypeError, r"Session\(seed=\.\.\.\): int has no state_dict"),
        ({"labels": 3}, ValueError, "labels=3: give names and values, as in team=vision"),
        ({"learning_rate": 0.1}, TypeError, r"Session\(learning_rate=\.\.\.\): float has no state_dict"),
        ({"state": {"model": net()}, "model": net()}, ValueError, "'model' is given twice"),
        (
            {"state": net()},
            TypeError,
            r'state=Linear: give names and objects, as in state=\{"policy": policy_net\}',
        ),
        ({"state": {"a.b": net()}}, ValueError, r"state=\{'a\.b': \.\.\.\}: give a name without dots"),
        ({"state": {"rng": net()}}, ValueError, "this name is reserved in checkpoints"),
        ({"store": ""}, ValueError, "store='' is empty: give a directory"),
        ({"store": __file__}, ValueError, f"store {re.escape(__file__)} is a file: give a directory"),
    ],
)
def test_what_cannot_have_been_meant_is_refused_by_name(tmp_path, given, error, message):
    with pytest.raises(error, match=message):
        holdfast.Session("job", **{"store": tmp_path} | given)


def test_a_misspelt_keyword_is_named_where_the_checkpoint_has_another(tmp_path):
    with holdfast.Session("job", store=tmp_path, model=net(), policy_net=net()) as session:
        session.resume()
        session.step()
    with (
        pytest.raises(
            holdfast.IncompatibleCheckpoint, match=r"no 'modle'; .* Did you mean Session\(model=\.\.\.\)"
        ),
        holdfast.Session("job", store=tmp_path, modle=net(), policy_net=net()) as session,
    ):
        session.resume()


def test_an_object_under_a_name_like_that_of_a_setting_is_an_object(tmp_path):
    generator = torch.Generator()
    with holdfast.Session("job", store=tmp_path, polity=net(), stores=generator) as session:
        assert session._training.registry.objects.keys() == {"polity", "stores"}


def test_every_setting_is_one_by_name(tmp_path):
    """A setting that the session did not pass on would be taken for an object."""
    with session_of(tmp_path)[2] as session:
        assert session._training.registry.objects.keys() == {"model", "optimizer"}


def test_a_setting_that_makes_no_sense_shows_none_of_our_frames(tmp_path, monkeypatch):
    monkeypatch.setenv("HOLDFAST_BUDGET", "abc")
    with pytest.raises(ValueError, match="HOLDFAST_BUDGET: budget 'abc' is not a number") as caught:
        holdfast.Session("job", store=tmp_path, model=net())
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert [pathlib.Path(frame.filename).name for frame in frames] == ["test_session_arguments.py", "session.py"]
    assert caught.value.__suppress_context__


def test_a_session_without_objects_says_so_once(tmp_path, caplog):
    with holdfast.Session("job", store=tmp_path) as session:
        session.resume()
        session.step()
    assert caplog.text.count("was given no objects") == 1


def test_steps_after_close_are_counted_and_reported_once(tmp_path, caplog):
    model, optimizer, session = session_of(tmp_path)
    iterate(model, optimizer, session)
    session.close()
    caplog.clear()
    for _ in range(3):
        iterate(model, optimizer, session)
    assert session.iteration == 4
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "session.step() after session.close(): iteration 2 and those after it are in no" in caplog.text


@pytest.mark.parametrize("metric", ["text", torch.ones(3), None, [1.0]])
def test_a_metric_that_is_no_scalar_is_reported_once_by_name_and_training_goes_on(tmp_path, caplog, metric):
    _, _, session = session_of(tmp_path)
    with session:
        for _ in range(4):
            session.step(loss=torch.ones(1), accuracy=metric)
    warned = [record.getMessage() for record in caplog.records if "is not a scalar" in record.getMessage()]
    assert len(warned) == 1
    assert warned[0].startswith(f"metric accuracy is not a scalar ({type(metric).__name__}), and recorded as NaN")
    assert session.iteration == 4


def test_an_empty_variable_for_the_store_means_its_default(tmp_path, monkeypatch):
    monkeypatch.setenv("HOLDFAST_STORE", "")
    monkeypatch.chdir(tmp_path)
    with holdfast.Session("job", model=net()) as session:
        session.step()
    assert (tmp_path / "checkpoints" / "job").is_dir()
