"""How attempts end, as sessions note it and as the next start counts it."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.store import Ending, LocalStore, records
from holdfast.system.files import Files
from tests.support.small_session import iterate, session_of

BESIDE = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[4])}


def counted(store):
    """Failures that the next attempt knows of."""
    *_, session = session_of(store)
    try:
        session.resume()
        return session._controller.job_history.history.failures.count
    finally:
        session._close("SIGKILL")


def trained(store, iterations=2):
    model, optimizer, session = session_of(store)
    session.resume()
    for _ in range(iterations):
        iterate(model, optimizer, session)
        session.wait(300)
    return session


def test_a_session_says_how_it_ended(tmp_path):
    trained(tmp_path).close()
    with pytest.raises(KeyboardInterrupt), trained(tmp_path, 1):
        raise KeyboardInterrupt
    with pytest.raises(ZeroDivisionError), trained(tmp_path, 3):
        raise ZeroDivisionError
    found = [(each.attempt, each.reason, each.iterations) for each in LocalStore(tmp_path).records("m", Ending)]
    assert found == [(1, "finished", 2), (2, "interrupted", 1), (3, "ZeroDivisionError", 3)]


def test_what_a_person_stopped_has_not_failed(tmp_path):
    trained(tmp_path).close()
    trained(tmp_path)._close("interrupted")
    assert counted(tmp_path) == 0


def test_an_error_in_the_loop_is_a_failure(tmp_path):
    trained(tmp_path)._close("ZeroDivisionError")
    assert counted(tmp_path) == pytest.approx(1)


def test_an_error_before_the_first_iteration_is_none(tmp_path):
    trained(tmp_path).close()
    trained(tmp_path, 0)._close("ImportError")
    assert counted(tmp_path) == 0


@pytest.mark.processes
def test_one_that_was_killed_says_nothing_and_has_failed(tmp_path, monkeypatch):
    script = (
        "import os, sys\n"
        "from tests.support.small_session import iterate, session_of\n"
        "model, optimizer, session = session_of(sys.argv[1])\n"
        "session.resume()\n"
        "iterate(model, optimizer, session)\n"
        "session.wait(300)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    monkeypatch.setattr(records, "STARTING_SECONDS", 0.0)
    killed = subprocess.run([sys.executable, "-c", script, str(tmp_path)], env=BESIDE, check=False)
    assert killed.returncode == -9
    assert counted(tmp_path) == pytest.approx(1)


def test_failures_are_remembered_from_attempt_to_attempt(tmp_path):
    for _ in range(3):
        trained(tmp_path)._close("ZeroDivisionError")
    trained(tmp_path).close()
    assert counted(tmp_path) == pytest.approx(3)


def test_a_store_that_cannot_say_is_no_failure(tmp_path, monkeypatch):
    store = LocalStore(tmp_path)

    def away(*_):
        raise OSError(errno.EIO, "away")

    monkeypatch.setattr(LocalStore, "records", away)
    monkeypatch.setattr(LocalStore, "append", away)
    records.record_ending(store, "m", 1, "finished", 3)
    assert records.failures_between(store, "m", 1, 3) == 0


@pytest.fixture
def store(tmp_path):
    """Ten attempts, each begun an hour after the one before. The eighth finished, the others say nothing."""
    store = LocalStore(tmp_path, Hourly())
    for number in range(1, 11):
        store.acquire_attempt("m", "uid")
        if number == 8:
            store.append("m", Ending(attempt=8, reason="finished", iterations=5, at=0.0))
    return store


class Hourly(Files):
    hours = 0

    def now(self):
        self.hours += 1
        return 3600.0 * self.hours


def test_only_attempts_since_the_checkpoint_count(store):
    assert records.failures_between(store, "m", 7, 10) == 2
    assert records.failures_between(store, "m", 8, 10) == 1
    assert records.failures_between(store, "m", 10, 10) == 0


def test_starts_that_fail_one_after_the_other_are_none_of_trainings_failures(store, monkeypatch):
    monkeypatch.setattr(records, "STARTING_SECONDS", 7200.0)
    assert records.failures_between(store, "m", 3, 10) == 1  # the one that has taken a checkpoint


@pytest.mark.parametrize(
    ("last_exit", "failures"), [("killed by SIGTERM", 1), ("killed by SIGKILL", 2), (None, 2)]
)
def test_what_a_scheduler_has_told_to_go_has_not_failed(store, last_exit, failures):
    assert records.failures_between(store, "m", 7, 10, last_exit) == failures
