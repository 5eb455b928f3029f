"""What a script is told that trains beside its checkpoints, or whose end no checkpoint holds."""

import contextlib
import logging
import re
import subprocess
import sys

import pytest
import torch

import holdfast
from holdfast.engine.unsaved_work import UNCOUNTED_UPDATES
from tests.support.small_session import iterate, session_of


def test_a_loop_that_does_not_go_on_from_its_checkpoints_is_told(tmp_path, caplog):
    caplog.set_level(logging.INFO, "holdfast")
    for _ in range(2):
        model, optimizer, session = session_of(tmp_path)
        with session:
            iterate(model, optimizer, session)
    said = [record.message for record in caplog.records if "call session.resume()" in record.message]
    assert len(said) == 1
    assert "but the job has 1 checkpoints, the newest 000000000001-1: to resume" in said[0]


def test_at_the_end_it_is_said_what_no_checkpoint_holds(tmp_path, caplog):
    model, optimizer, session = session_of(tmp_path)
    session.every(10**9)
    iterate(model, optimizer, session)
    session._close("interrupted")
    assert "the iterations after 0 are in no checkpoint: the next attempt starts at iteration 0" in caplog.text


@pytest.mark.parametrize("error", [None, ZeroDivisionError])
@pytest.mark.parametrize("resumes", [True, False])
def test_a_loop_that_never_calls_step_is_warned_at_its_end(tmp_path, caplog, resumes, error):
    model, optimizer, session = session_of(tmp_path)
    with pytest.raises(error) if error else contextlib.nullcontext(), session:
        if resumes:
            session.resume()
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        if error:
            raise error
    assert ("session.step() was never called" in caplog.text) is (error is None)


def test_a_loop_that_does_not_call_step_is_warned_while_it_trains(tmp_path, caplog):
    model, optimizer, session = session_of(tmp_path)
    with session:
        session.resume()
        model(torch.ones(1, 4)).sum().backward()
        for _ in range(UNCOUNTED_UPDATES - 1):
            optimizer.step()
        assert "session.step() was not called" not in caplog.text
        for _ in range(2):
            optimizer.step()
        assert caplog.text.count("optimizer.step() ran 1000 times, but session.step() was not called: no") == 1


def test_a_loop_with_many_updates_in_an_iteration_is_warned_of_nothing(tmp_path, caplog):
    model, optimizer, session = session_of(tmp_path)
    with session:
        iterate(model, optimizer, session)
        for _ in range(UNCOUNTED_UPDATES):
            optimizer.step()
        session.step()
    assert "session.step() was not called" not in caplog.text


def end_within_an_iteration(tmp_path, *, batches, updates=0, requested=False, every=10**9):
    model, optimizer, session = session_of(tmp_path)
    session.every(every)
    with session:
        loader = session.batches([torch.ones(1, 4)] * 10)
        next(loader)
        iterate(model, optimizer, session)
        for _ in range(batches):
            model(next(loader)).sum().backward()
        for _ in range(updates):
            optimizer.step()
        if requested:
            session.checkpoint()
        session.wait(300)
    return session


def test_a_loop_that_ends_within_an_iteration_is_told_how_to_get_its_final_checkpoint(tmp_path, caplog):
    session = end_within_an_iteration(tmp_path, batches=2)
    assert session._saver.history.store.checkpoints("m") == []
    assert (
        "m: 2 batches were drawn after the last session.step(), so no final checkpoint is taken: " in caplog.text
    )
    assert "apply those of the last batches and call session.step() once more" in caplog.text
    assert "the iterations after 0 are in no checkpoint" in caplog.text


def test_a_loop_that_ends_after_a_further_update_is_told_to_call_step(tmp_path, caplog):
    end_within_an_iteration(tmp_path, batches=1, updates=1, every=1)
    assert (
        "m: optimizer.step() ran after the last session.step(), so no final checkpoint is taken: " in caplog.text
    )
    assert "is taken: call it after the last update" in caplog.text


def test_a_request_that_no_step_follows_is_answered_at_the_end(tmp_path, caplog):
    end_within_an_iteration(tmp_path, batches=1, requested=True)
    assert "no final checkpoint is taken, nor the one that was requested: " in caplog.text


def test_a_loop_that_draws_one_batch_too_many_loses_nothing_and_is_not_warned(tmp_path, caplog):
    session = end_within_an_iteration(tmp_path, batches=1, every=1)
    assert session._saver.history.store.checkpoints("m") == ["000000000001-1"]
    assert not [each for each in caplog.records if "no final checkpoint" in each.message and each.levelno > 20]


def test_a_durable_checkpoint_is_told_once_a_minute(tmp_path, caplog):
    caplog.set_level(logging.DEBUG, "holdfast")
    model, optimizer, session = session_of(tmp_path)
    with session:
        for _ in range(2):
            iterate(model, optimizer, session)
            session.wait(300)
    told = [(record.levelname, record.message) for record in caplog.records if "is durable" in record.message]
    assert [level for level, _ in told] == ["INFO", "DEBUG"]
    assert re.fullmatch(r"\S+: checkpoint of iteration 1 is durable, written in \S+ \S+", told[0][1])


LOGGING = """
import logging, sys
from holdfast.telemetry.reporter import console_log, logger
before = (logger.level, logger.propagate, list(logger.handlers), list(logger.filters))
for when in sys.argv[1:]:
    if when == "before":
        logging.basicConfig(format="script: %(message)s", stream=sys.stderr)
    for _ in range(2):
        console_log.open()
    if when == "meanwhile":
        logging.basicConfig(format="script: %(message)s", stream=sys.stderr)
    logger.warning("once")
    console_log.close()
    logger.warning("twice")
    console_log.close()
    assert (logger.level, logger.propagate, list(logger.handlers), list(logger.filters)) == before
    logging.root.handlers.clear()
"""


def test_the_log_is_shown_once_and_the_logger_is_left_as_it_was():
    """With a time and a level, unless the script logs itself, from the start or from later on."""
    command = [sys.executable, "-c", LOGGING, "never", "before", "meanwhile"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stderr.splitlines()
    stamp = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d WARNING holdfast: "
    expected = [f"{stamp}once", f"{stamp}twice", *["script: once", "script: twice"] * 2]
    assert len(lines) == len(expected)
    for pattern, line in zip(expected, lines, strict=True):
        assert re.fullmatch(pattern, line), line


def test_control_characters_of_a_name_in_a_store_are_escaped_in_the_log(tmp_path, caplog):
    name = "\x1b[2J\x9b31m\rFORGED\u202e.json"
    (tmp_path / "m" / "holds").mkdir(parents=True)
    (tmp_path / "m" / "holds" / name).write_text("{}")
    model, optimizer, session = session_of(tmp_path, keep=1)
    with session:
        for _ in range(3):
            iterate(model, optimizer, session)
            session.wait(300)
            assert session._saver.retention.wait_idle(300)
    assert r"\x1b[2J\x9b31m\rFORGED\u202e.json is not a Holdfast record, ignoring it" in caplog.text
    assert all(line.isprintable() for line in caplog.text.split("\n"))


class KeepsObjects(torch.optim.SGD):
    """Keeps an object in its state from the first update on."""

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["projector"] = object()
        return super().step(closure)


def test_a_finished_job_is_not_warned_of_how_its_data_is_read_again(tmp_path, caplog):
    for _ in range(2):
        model, optimizer, session = session_of(tmp_path)
        with session:
            for _batch in session.batches(number for number in range(3)):
                iterate(model, optimizer, session)
    assert session.iteration == 3
    assert caplog.text.count("generator cannot continue from a position") == 1


def test_how_data_is_read_again_is_said_once_for_loaders_of_one_kind(tmp_path, caplog):
    model, optimizer, session = session_of(tmp_path)
    with session:
        for number in range(5):
            for _batch in session.batches([number]):
                iterate(model, optimizer, session)
    assert caplog.text.count("list cannot continue from a position") == 1


def test_no_code_of_what_attributes_refer_to_ends_a_start(tmp_path):
    class Proxy:
        @property
        def __class__(self):
            raise RuntimeError("working outside of a context")

        def __repr__(self):
            raise RuntimeError("working outside of a context")

    model, optimizer, session = session_of(tmp_path)
    model.__dict__["request"] = Proxy()
    model.by_proxy = {Proxy(): 1}
    with session:
        session.resume()
        for _ in range(12):
            iterate(model, optimizer, session)
    assert session.iteration == 12


def test_state_that_cannot_be_stored_is_one_warning(tmp_path, caplog):
    model = torch.nn.Linear(4, 1)
    optimizer = KeepsObjects(model.parameters())
    with holdfast.Session("m", store=tmp_path, every=1, model=model, optimizer=optimizer) as session:
        for _ in range(3):
            iterate(model, optimizer, session)
    warnings = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert (
        len([each for each in warnings if "optimizer.state.projector.weight: cannot store" in each.getMessage()])
        == 1
    )
    assert not [each for each in warnings if each.levelno > logging.WARNING or each.exc_info]


def test_a_limitation_of_several_given_loaders_is_said_once(tmp_path, caplog):
    sampler = torch.utils.data.DistributedSampler(range(8), num_replicas=2, rank=0)
    loaders = {name: holdfast.DataLoader(range(8), batch_size=2, sampler=sampler) for name in ("train", "test")}
    with holdfast.Session("job", store=tmp_path, model=torch.nn.Linear(1, 1), **loaders) as session:
        session.resume()
    assert caplog.text.count("DistributedSampler splits samples among 2 ranks") == 1
