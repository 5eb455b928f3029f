"""Optimizer steps that a CUDA graph replays; `tests/end_to_end/test_device_copies.py` does so on a device."""

import threading

import pytest
import torch

import holdfast
from holdfast.engine import training
from holdfast.save.copying import HostCopies
from holdfast.save.run import RunState
from tests.support.small_session import iterate, session_of


@pytest.fixture
def capture(monkeypatch):
    """Runs a function as if its CUDA stream were captured."""
    monkeypatch.setattr(training.accelerators, "are_in_use", lambda: True)
    monkeypatch.setattr(training.accelerators, "is_capturing", lambda: False)

    def capture(function, *arguments):
        with monkeypatch.context() as now:
            now.setattr(training.accelerators, "is_capturing", lambda: True)
            function(*arguments)

    return capture


class Copies:
    def __init__(self):
        self.at_once = []

    def run_changed(self, run, state):
        if state is RunState.COPYING:
            self.at_once.append(run.at_once)


def steps(session, copies, *, waits):
    """End an iteration whose update no hook sees; say whether its checkpoint was copied at once."""
    if waits:
        session.wait_copied()
    session.step()
    session.wait(300)
    return copies.at_once[-1]


def test_a_checkpoint_is_copied_at_once_unless_the_script_waits_before_a_replay(capture, tmp_path, caplog):
    model, optimizer, session = session_of(tmp_path)
    copies = Copies()
    session.observe(copies)
    with session:
        iterate(model, optimizer, session)
        session.wait(300)
        assert copies.at_once == [False], "hooks call before the next update"
        capture(optimizer.step)
        assert [steps(session, copies, waits=waits) for waits in (False, True, False)] == [True, False, True]
    assert caplog.text.count("a CUDA graph replays optimizer steps") == 1


def test_a_step_of_another_optimizer_is_no_announcement(capture, tmp_path):
    model = torch.nn.Linear(4, 4)
    replayed, eager = (torch.optim.SGD([each], lr=0.1, momentum=0.9) for each in (model.weight, model.bias))
    copies = Copies()
    with holdfast.Session("m", store=tmp_path, every=1, model=model, replayed=replayed, eager=eager) as session:
        session.observe(copies)
        capture(replayed.step)
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            eager.step()
            assert steps(session, copies, waits=False)


def test_a_capture_waits_until_the_copy_under_way_has_ended(capture, tmp_path, monkeypatch):
    model, optimizer, session = session_of(tmp_path)
    copying, proceed, real = threading.Event(), threading.Event(), HostCopies.run

    def held(copies):
        copying.set()
        assert proceed.wait(300)
        real(copies)

    monkeypatch.setattr(HostCopies, "run", held)
    with session:
        iterate(model, optimizer, session)
        assert copying.wait(300)
        releasing = threading.Timer(0.05, proceed.set)
        releasing.start()
        capture(optimizer.step)
        assert proceed.is_set()
        assert not session._saver.snapshots.copying
        releasing.join()


def test_where_no_hook_has_seen_an_update_the_next_one_may_be_a_replay(capture, tmp_path):
    _, _, session = session_of(tmp_path)
    copies = Copies()
    session.observe(copies)
    with session:
        assert steps(session, copies, waits=False)


def test_a_state_without_an_optimizer_is_not_copied_at_once(capture, tmp_path):
    copies = Copies()
    with holdfast.Session("m", store=tmp_path, every=1, model=torch.nn.Linear(4, 4)) as session:
        session.observe(copies)
        assert not steps(session, copies, waits=False)


def test_a_script_that_replays_its_updates_is_not_restored_in_place(capture, tmp_path):
    _, optimizer, session = session_of(tmp_path)
    with session:
        assert "session.batches" in session._training.obstacle_to_restore()
        capture(optimizer.step)
        assert "CUDA graph" in session._training.obstacle_to_restore()
        session._training._restorable_in_place = True
        assert "CUDA graph" in session._training.obstacle_to_restore()
