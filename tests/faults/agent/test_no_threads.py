"""Where no thread can be started, or the trainer is nicer than its helpers, training goes on all the same."""

import os
import subprocess
import sys
import threading

import pytest
import torch

from holdfast.checkpoint import restore
from holdfast.store import open_store
from tests.support.small_session import iterate, session_of


@pytest.fixture
def no_threads(monkeypatch):
    """As many threads as there may be, while it is entered."""
    real, refused = threading.Thread.start, []

    def start(thread):
        if refused:
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    return refused


def test_training_goes_on_and_checkpoints_come_back(tmp_path, no_threads):
    model, optimizer, session = session_of(tmp_path)
    no_threads.append(True)
    for _ in range(3):
        iterate(model, optimizer, session)
    assert session.iteration == 3
    no_threads.clear()
    for _ in range(3):
        iterate(model, optimizer, session)
        session.wait(300)
    session.close()
    assert open_store(str(tmp_path)).checkpoints("m")


def test_a_restore_does_with_fewer_threads(tmp_path, no_threads):
    model, optimizer, session = session_of(tmp_path)
    with session:
        iterate(model, optimizer, session)
    store = open_store(str(tmp_path))
    no_threads.append(True)
    loaded = restore.load(store, "m", store.checkpoints("m")[-1])
    assert torch.equal(loaded.tensors["model.weight"], model.weight)


SCRIPT = """
import os, sys, torch, holdfast, tests.support.eager_torch
os.nice(15)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
session = holdfast.Session("m", store=sys.argv[1], every=1, model=model, optimizer=optimizer)
with session:
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    session.step()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="where niceness belongs to a thread")
def test_a_trainer_that_is_nicer_than_its_writing_thread_gets_its_checkpoints(tmp_path):
    """Without the right to become less nice again, which root in a container often lacks as well."""
    drop = ["setpriv", "--bounding-set=-sys_nice", "--inh-caps=-sys_nice"] if os.geteuid() == 0 else []
    command = [*drop, sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert open_store(str(tmp_path)).checkpoints("m") == ["000000000001-1"], done.stderr
