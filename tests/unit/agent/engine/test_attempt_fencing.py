"""The warning of a new attempt about the process of the attempt before it."""

import logging
import os
import socket
import subprocess
import sys
import time

import pytest

from holdfast.engine.unsaved_work import describe_running_predecessor
from holdfast.store import open_store
from holdfast.store.records import Attempt, Ending
from tests.support.small_session import session_of

OTHER = """
import sys
from holdfast.store import open_store
open_store(sys.argv[1]).acquire_attempt("m", "other")
print("acquired", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other(tmp_path):
    """Process of attempt 1, which runs until its input ends."""
    with subprocess.Popen(
        [sys.executable, "-c", OTHER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "acquired\n"
        yield process
        process.stdin.close()


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="needs the start times of processes")
def test_a_start_warns_of_a_process_that_still_trains_the_job(tmp_path, other, caplog):
    caplog.set_level(logging.INFO, "holdfast")
    _, _, session = session_of(tmp_path)
    session.resume()
    session.close()
    warned = [each.message for each in caplog.records if each.levelno >= logging.WARNING]
    assert warned == [
        f"m: attempt 1 (process {other.pid} on this machine) was still running and can no longer save. If it is "
        "a different training, give it another job name"
    ]


def test_no_warning_about_an_attempt_that_has_ended_in_a_process_that_still_runs(tmp_path, other):
    store = open_store(str(tmp_path))
    store.append("m", Ending(attempt=1, reason="finished", iterations=9, at=time.time()))
    store.acquire_attempt("m", "new")
    assert describe_running_predecessor(store, "m", 2) is None


class Records:
    def __init__(self, **attempt):
        given = {"host": socket.gethostname(), "pid": os.getppid(), "started_at": time.time()} | attempt
        self.attempt = Attempt(number=1, uid="other", **given)

    def records(self, job, kind, since):
        return [self.attempt] if kind is Attempt else []


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="needs the start times of processes")
def test_only_a_process_of_this_machine_that_is_older_than_its_attempt_counts():
    assert describe_running_predecessor(Records(), "m", 2) is not None
    for others in ({"host": "elsewhere"}, {"pid": os.getpid()}, {"pid": 2**31 - 1}, {"started_at": 1.0}):
        assert describe_running_predecessor(Records(**others), "m", 2) is None, others
