"""The states of a checkpoint: which transitions there are, who hears of them, and who waits."""

import itertools
import threading

import pytest

from holdfast.save.host_buffers import Arena
from holdfast.save.run import (
    NEXT,
    SETTLED,
    CopyResult,
    IllegalTransition,
    RunState,
    WriteResult,
)
from tests.support.persist_job import requested

PATHS = [
    path
    for count in range(5)
    for path in itertools.product(RunState, repeat=count)
    if all(to in NEXT[state] for state, to in itertools.pairwise((RunState.REQUESTED, *path)))
]


def move(run, to):
    if to is RunState.COPYING:
        run.begin_copy(Arena(), run.draft)
    elif to is RunState.COPIED:
        run.end_copy(CopyResult(seconds=0.5))
    elif to is RunState.WRITING:
        run.begin_write()
    else:
        run.end(to, WriteResult(reason=None if to is RunState.DURABLE else "a fault"))


def test_every_state_is_reached_and_none_is_left_once_settled():
    assert set(itertools.chain.from_iterable(PATHS)) == set(RunState) - {RunState.REQUESTED}
    assert all(not NEXT[state] for state in SETTLED)
    assert all(NEXT[state] & SETTLED for state in set(RunState) - SETTLED)


@pytest.mark.parametrize("path", PATHS, ids="-".join)
def test_a_transition_is_made_once_and_all_others_raise_and_change_nothing(path):
    run = requested()
    for to in path:
        move(run, to)
    before = run.state, run.copy, run.result, run.arena, run.draft
    for to in set(RunState) - NEXT[run.state] - {RunState.REQUESTED}:
        with pytest.raises(IllegalTransition, match=f"cannot go from {run.state} to {to}"):
            move(run, to)
    assert (run.state, run.copy, run.result, run.arena, run.draft) == before


def test_listeners_hear_of_each_transition_in_order_before_a_wait_ends():
    heard, go = [], threading.Event()

    class BlockingListener:
        def run_changed(self, run, state):
            assert run.state == state
            if state is RunState.DURABLE:
                assert go.wait(300)
            heard.append(state)

    run = requested(1, BlockingListener())
    for to in (RunState.COPYING, RunState.COPIED, RunState.WRITING):
        move(run, to)
    thread = threading.Thread(target=move, args=(run, RunState.DURABLE))
    thread.start()
    assert not run.wait_settled(0.1)
    go.set()
    assert run.wait_settled(300)
    assert heard == ["copying", "copied", "writing", "durable"]
    thread.join()


def test_a_listener_that_fails_is_logged_and_the_others_hear(caplog):
    heard = []

    class RaisingListener:
        def run_changed(self, run, state):
            raise ZeroDivisionError

    class Listener:
        def run_changed(self, run, state):
            heard.append(state)

    run = requested(1, RaisingListener(), Listener())
    move(run, RunState.FAILED)
    assert heard == ["failed"]
    assert run.wait_settled(0)
    assert "could not report checkpoint 000000000001-1 as failed" in caplog.text
