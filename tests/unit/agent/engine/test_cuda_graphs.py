"""Optimizer steps that a CUDA graph replays; `tests/end_to_end/test_device_copies.py` does so on a device."""

import pytest

from holdfast.engine import training
from holdfast.snapshot.checkpoint_run import RunState
from tests.support.small_session import iterate, session_of


@pytest.fixture
def capture(monkeypatch):
    """Runs a function as if its CUDA stream were captured."""
    monkeypatch.setattr(training, "_uses_cuda", lambda: True)
    monkeypatch.setattr(training, "_is_capturing", lambda: False)

    def capture(function, *arguments):
        with monkeypatch.context() as now:
            now.setattr(training, "_is_capturing", lambda: True)
            function(*arguments)

    return capture


class Copies:
    def __init__(self):
        self.at_once = []

    def run_changed(self, run, state):
        if state is RunState.COPYING:
            self.at_once.append(run.request.at_once)


def test_a_checkpoint_is_copied_at_once_unless_the_script_waits_before_a_replay(capture, tmp_path, caplog):
    model, optimizer, session = session_of(tmp_path)
    copies = Copies()
    session.observe(copies)
    with session:
        iterate(model, optimizer, session)
        session._checkpoints.wait_settled(60)
        assert copies.at_once == [False], "a hook announces the next update"
        capture(optimizer.step)
        for waits in (False, True, False):
            if waits:
                session.wait_copied()
            session.step()
            session._checkpoints.wait_settled(60)
        assert copies.at_once == [False, True, False, True]
    assert caplog.text.count("a CUDA graph replays an optimizer step") == 1


def test_no_update_that_was_ever_announced_means_that_the_next_one_is_not_either(capture, tmp_path):
    _, _, session = session_of(tmp_path)
    copies = Copies()
    session.observe(copies)
    with session:
        session.step()
        session._checkpoints.wait_settled(60)
    assert copies.at_once[0] is True


def test_a_script_that_replays_its_updates_is_not_restored_in_place(capture, tmp_path):
    _, optimizer, session = session_of(tmp_path)
    with session:
        assert "session.batches" in session._training.obstacle_to_restore()
        capture(optimizer.step)
        assert "CUDA graph" in session._training.obstacle_to_restore()
