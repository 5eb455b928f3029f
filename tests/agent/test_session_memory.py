"""Where a session keeps its snapshots: it follows from what writes them."""

import os
import threading

import pytest
import small_session
import torch
from small_session import session_of

from holdfast.copying import HostCopies

TRIES = 6


def iterate(model, optimizer, session):
    small_session.iterate(model, optimizer, session)
    assert session._checkpoints.wait_settled(300)


def is_shared(session):
    return [layout.arena.fd >= 0 for layout in session._checkpoints.snapshots._layouts]


def test_a_thread_gets_memory_of_its_own_and_a_process_what_it_can_map(tmp_path):
    found = {}
    for backend in ("thread", "process"):
        model, optimizer, session = session_of(tmp_path / backend, backend=backend)
        with session:
            iterate(model, optimizer, session)
            found[backend] = is_shared(session)
    assert found == {"thread": [False], "process": [True]}


def test_memory_follows_the_choice_of_auto(tmp_path):
    model, optimizer, session = session_of(tmp_path, backend="auto")
    with session:
        iterate(model, optimizer, session)
        assert is_shared(session) == [True]
        for backend in ("thread", "process"):
            for _ in range(TRIES):
                session._checkpoints.persister.measured(backend, 0.01, 0.1)
        for _ in range(3):
            iterate(model, optimizer, session)
        assert session._checkpoints.persister.backend == "thread"
        assert is_shared(session) == [False]
    assert len(session._checkpoints.store.checkpoints("m")) == 4


def test_what_a_fork_leaves_out_are_weights_moments_and_the_gradients_of_the_moment(tmp_path):
    model, optimizer, session = session_of(tmp_path, backend="fork")
    taken = []
    real = session._checkpoints.snapshots.begin

    def begin(*args, **options):
        taken.append(real(*args, **options))
        return taken[-1]

    session._checkpoints.snapshots.begin = begin
    with session:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        session.step()
        live = {tensor.data_ptr() for tensor in taken[0].live()}
        moments = [value for state in optimizer.state.values() for value in state.values()]
        tensors = [*model.parameters(), *moments, *(parameter.grad for parameter in model.parameters())]
        assert {tensor.data_ptr() for tensor in tensors} <= live
        optimizer.zero_grad()
        assert len(taken[0].live()) == len(live) - 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a platform with forks")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_child_forked_within_a_copy_trains_on_without_the_session(tmp_path, monkeypatch, caplog):
    go, real = threading.Event(), HostCopies.run

    def run(copies):
        assert go.wait(30)
        real(copies)

    model, optimizer, session = session_of(tmp_path, backend="thread")
    monkeypatch.setattr(HostCopies, "run", run)
    with session:
        model(torch.ones(2, 4)).sum().backward()
        session.step()
        assert session._checkpoints.snapshots.copying
        pid = os.fork()
        if not pid:
            try:
                optimizer.step()  # would wait for ever for a thread that is not there
                session.step()
                session.step()
                said = [
                    record.message
                    for record in caplog.records
                    if "make the session after the fork" in record.message
                ]
                os._exit(0 if len(said) == 1 and session.iteration == 3 else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        go.set()
        optimizer.step()
        session.step()
    assert session._checkpoints.head is not None
