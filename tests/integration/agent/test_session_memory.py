"""Where a session keeps its snapshots: it follows from what writes them."""

import os
import subprocess
import sys
import threading

import pytest
import torch

from holdfast.save.copying import HostCopies
from holdfast.store import open_store
from tests.support import small_session
from tests.support.small_session import session_of


def iterate(model, optimizer, session):
    small_session.iterate(model, optimizer, session)
    session.wait(300)


GRADIENTS_COME_AND_GO = """
import sys
import torch, holdfast, tests.support.eager_torch
torch.set_num_threads(1)
layers = [each for _ in range(40) for each in (torch.nn.Linear(16, 16), torch.nn.Tanh())]
model = torch.nn.Sequential(*layers)
optimizer = torch.optim.AdamW(model.parameters())
given = {"model": model, "optimizer": optimizer}
with holdfast.Session("m", store=sys.argv[1], every=3, **given) as session:
    for _ in range(100):
        optimizer.zero_grad()
        model(torch.ones(2, 16)).sum().backward()
        optimizer.step()
        session.step()
"""


@pytest.mark.parametrize("times", [1, pytest.param(30, marks=pytest.mark.long)])
def test_gradients_that_a_backward_pass_replaces_beside_a_checkpoint_end_no_training(tmp_path, times):
    """A backward pass holds no interpreter lock: a read of `parameter.grad` on another thread is a SIGSEGV."""
    for number in range(times):
        command = [sys.executable, "-c", GRADIENTS_COME_AND_GO, str(tmp_path / str(number))]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr
        assert open_store(str(tmp_path / str(number))).checkpoints("m")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a platform with forks")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_child_forked_within_a_copy_trains_on_without_the_session(tmp_path, monkeypatch, caplog):
    go, real = threading.Event(), HostCopies.run

    def run(copies):
        assert go.wait(300)
        real(copies)

    model, optimizer, session = session_of(tmp_path)
    monkeypatch.setattr(HostCopies, "run", run)
    with session:
        model(torch.ones(2, 4)).sum().backward()
        session.step()
        assert session._saver.snapshots.copying
        pid = os.fork()
        if not pid:
            try:
                optimizer.step()  # would wait for ever for a thread that is not there
                session.step()
                session.step()
                said = [
                    record.message
                    for record in caplog.records
                    if "create the session after the fork" in record.message
                ]
                os._exit(0 if len(said) == 1 and session.iteration == 3 else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        go.set()
        optimizer.step()
        session.step()
    assert session._saver.history.head is not None
