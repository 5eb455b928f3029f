"""The states of a session: which may follow which, and how the process ends in each."""

import logging
import os
import signal

import pytest
import torch

import holdfast
from holdfast.engine.lifecycle import TRANSITIONS, Life, Lifecycle
from holdfast.engine.startup import Startup
from holdfast.engine.training import Training
from holdfast.save.saver import Saver
from holdfast.system import supervisor_channel
from holdfast.system.preemption import EXIT_SIGTERM
from tests.support.small_session import iterate, session_of


def at(state):
    """A lifecycle that came to `state` by allowed transitions."""
    ways, seen = [[Life.STARTING]], {Life.STARTING}
    for way in ways:
        if way[-1] is state:
            lifecycle = Lifecycle()
            for each in way[1:]:
                lifecycle.enter(each)
            return lifecycle
        following = sorted(TRANSITIONS[way[-1]] - seen, key=lambda each: each.value)
        seen.update(following)
        ways += [[*way, each] for each in following]
    raise AssertionError(f"{state} cannot be reached")


@pytest.mark.parametrize("after", Life)
@pytest.mark.parametrize("before", [each for each in Life if each is not Life.FORKED])
def test_only_listed_transitions_are_made(before, after):
    lifecycle = at(before)
    if after in TRANSITIONS[before]:
        lifecycle.enter(after)
        assert lifecycle.state is after
    else:
        with pytest.raises(RuntimeError, match=f"that is {before.value} cannot become {after.value}"):
            lifecycle.enter(after)
        assert lifecycle.state is before


@pytest.mark.parametrize("supervised", [False, True])
@pytest.mark.parametrize("state", [each for each in Life if each is not Life.FORKED])
def test_how_the_process_ends(state, supervised, monkeypatch):
    monkeypatch.delenv(supervisor_channel.VARIABLE, raising=False)
    if supervised:
        monkeypatch.setenv(supervisor_channel.VARIABLE, "/nowhere")
    replaced = supervisor_channel.EXIT_FENCED if supervised else None
    ends = {
        Life.PREEMPTED: EXIT_SIGTERM,
        Life.ENDED: supervisor_channel.EXIT_ENDED,
        Life.RELAUNCHED: supervisor_channel.EXIT_RELAUNCH,
        Life.REPLACED: replaced,
    }
    assert at(state).exit_status == ends.get(state)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a platform with forks")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("state", [Life.STARTING, Life.TRAINING, Life.CLOSED])
def test_in_a_forked_child_it_is_forked_whatever_it_was(state):
    lifecycle = at(state)
    pid = os.fork()
    if not pid:
        os._exit(0 if lifecycle.state is Life.FORKED and lifecycle.is_over else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert lifecycle.state is state


def test_a_session_that_cannot_begin_leaves_logging_and_signals_as_they_were(tmp_path, monkeypatch):
    def fail(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(Startup, "open", fail)
    handlers, before = list(logging.getLogger("holdfast").handlers), signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(logging.getLogger("holdfast"), "propagate", False)
    with pytest.raises(KeyboardInterrupt):
        session_of(str(tmp_path))
    assert logging.getLogger("holdfast").handlers == handlers
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("at", ["apply", "begin"])
def test_closing_after_an_interrupted_resume_takes_no_checkpoint(tmp_path, monkeypatch, at):
    model, optimizer, session = session_of(str(tmp_path), loop=holdfast.Variables())
    session.resume()
    for restored in (None, 1, None, None, None):
        if restored:
            session.restore(restored)
        iterate(model, optimizer, session)
        session.wait(300)
    session.close()
    taken = sorted(os.listdir(tmp_path / "m"))
    model, optimizer, session = session_of(str(tmp_path), loop=holdfast.Variables())
    apply = Training.apply

    def interrupted(self, *arguments):
        if at == "apply":
            apply(self, *arguments)
            torch.nn.init.zeros_(model.weight)
        raise KeyboardInterrupt

    monkeypatch.setattr(*((Training, "apply") if at == "apply" else (Saver, "save_survivor")), interrupted)
    with pytest.raises(KeyboardInterrupt):
        session.resume()
    monkeypatch.undo()
    session.close()
    assert sorted(os.listdir(tmp_path / "m")) == taken

    model, optimizer, session = session_of(str(tmp_path), loop=holdfast.Variables())
    assert session.resume() == 4
    iterate(model, optimizer, session)
    session.close()


def test_a_loader_worker_that_dies_does_not_interrupt_closing():
    """torch's handler raises on the main thread, wherever that is when a worker dies."""

    def raise_as_torch(*_):
        raise RuntimeError("DataLoader worker is killed by signal: Killed.")

    closed = []

    def close_while_a_worker_dies():
        os.kill(os.getpid(), signal.SIGCHLD)
        closed.append("first")

    lifecycle = at(Life.CLOSING)
    before = signal.signal(signal.SIGCHLD, raise_as_torch)
    try:
        lifecycle.close("job", [close_while_a_worker_dies, lambda: closed.append("second")])
        assert signal.getsignal(signal.SIGCHLD) is raise_as_torch
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert closed == ["first", "second"]
    assert lifecycle.state is Life.CLOSED
