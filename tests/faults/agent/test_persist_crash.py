"""The trainer dies while a checkpoint of it is being written."""

import os
import select
import signal
import subprocess
import sys

import pytest

from holdfast.store import open_store
from tests.support import SUPPORT
from tests.support.faulty_store import hear, tell
from tests.support.persist_job import JOB, bytes_of, committed_bytes, faulty, small_state

SCRIPT = SUPPORT / "killable_trainer.py"
FIRST = "000000000001-1"


@pytest.fixture
def killed(tmp_path):
    """Starts a trainer, kills it in the middle of a write; returns what tells whether the writer has ended."""
    opened = []

    def kill(backend):
        faulty(tmp_path, "wait")
        with subprocess.Popen([sys.executable, SCRIPT, backend, tmp_path]) as trainer:
            writer = int(hear(tmp_path / "reached"))
            opened.append(os.pidfd_open(writer))
            trainer.send_signal(signal.SIGKILL)
        return opened[0]

    yield kill
    for handle in opened:
        os.close(handle)


def ended(handle):
    """Waits for the end of the process."""
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    return bool(poll.poll(30_000))


def test_what_another_process_writes_becomes_durable_all_the_same(tmp_path, killed):
    writer = killed("process")
    store = open_store(tmp_path)
    assert store.checkpoints(JOB) == []
    tell(tmp_path / "go", "on")
    assert ended(writer)
    assert store.checkpoints(JOB) == [FIRST]
    assert committed_bytes(store, FIRST) == bytes_of(small_state())


def test_what_its_own_thread_writes_is_gone(tmp_path, killed):
    assert ended(killed("thread"))
    assert open_store(tmp_path).checkpoints(JOB) == []


def test_the_next_attempt_fences_what_the_dead_one_left_behind(tmp_path, killed):
    writer = killed("process")
    store = open_store(tmp_path)
    assert store.acquire_attempt(JOB, "second").number == 2
    tell(tmp_path / "go", "on")
    assert ended(writer)
    assert store.checkpoints(JOB) == []
    assert not list((tmp_path / JOB).glob(".tmp-*"))


def test_an_idle_helper_ends_with_its_trainer_whoever_holds_the_socket_open(tmp_path):
    faulty(tmp_path, "wait")
    with subprocess.Popen([sys.executable, SCRIPT, "process", tmp_path, "heir"]) as trainer:
        writer = os.pidfd_open(int(hear(tmp_path / "reached")))
        tell(tmp_path / "go", "on")
        assert hear(tmp_path / "reached") == "forked"
        trainer.send_signal(signal.SIGKILL)
    try:
        assert ended(writer)
    finally:
        os.close(writer)
        tell(tmp_path / "go", "heir")
