"""The states of a session: which may follow which, and how the process ends in each."""

import os

import pytest

from holdfast.engine.lifecycle import TRANSITIONS, Life, Lifecycle
from holdfast.system import supervisor_channel
from holdfast.system.preemption import EXIT_ASKED


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
    ends = {Life.PREEMPTED: EXIT_ASKED, Life.RELAUNCHED: supervisor_channel.EXIT_RELAUNCH, Life.REPLACED: replaced}
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
