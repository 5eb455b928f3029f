"""`session.wait`: no checkpoint is under way, and what became of each."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from holdfast.store import LocalStore
from holdfast.system.files import Files
from tests.support.small_session import iterate, session_of


def test_each_checkpoint_is_answered_for_once_in_the_order_of_iterations(tmp_path: Path) -> None:
    model, optimizer, session = session_of(tmp_path)
    with session:
        session.resume()
        for _ in range(3):
            iterate(model, optimizer, session)
            (outcome,) = session.wait(300)
            assert (outcome.checkpoint, outcome.iteration) == (f"{session.iteration:012d}-1", session.iteration)
            assert (outcome.state, outcome.is_durable, outcome.reason) == ("durable", True, None)
        assert session.wait() == []


def test_a_write_that_fails_is_answered_for_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer, session = session_of(tmp_path)
    with session:
        session.resume()
        with monkeypatch.context() as patched:

            def refuse(files: Files, fd: int, data: memoryview, at: int) -> int:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

            patched.setattr(Files, "write", refuse)
            iterate(model, optimizer, session)
            (outcome,) = session.wait(300)
        assert (outcome.iteration, outcome.state, outcome.is_durable) == (1, "failed", False)
        assert outcome.reason is not None
        assert "Input/output error" in outcome.reason


def test_one_that_could_not_begin_is_answered_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(LocalStore, "acquire_attempt", refuse)
    model, optimizer, session = session_of(tmp_path)
    with session:
        session.resume()
        iterate(model, optimizer, session)
        outcomes = session.wait(300)
        assert {outcome.state for outcome in outcomes} == {"failed"}
        assert all(outcome.reason for outcome in outcomes)


def test_a_wait_ends_after_its_timeout_and_counts_as_one_for_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, write, stalls = threading.Event(), Files.write, []

    def late(files: Files, fd: int, data: memoryview, at: int) -> int:
        assert goes_on.wait(300)
        return write(files, fd, data, at)

    model, optimizer, session = session_of(tmp_path)
    session.observe(_Listener(), lambda kind, seconds: stalls.append((kind, seconds)))
    with session:
        session.resume()
        monkeypatch.setattr(Files, "write", late)
        iterate(model, optimizer, session)
        with pytest.raises(TimeoutError, match=r"session\.wait: a checkpoint is still in progress after 0\.05 s"):
            session.wait(0.05)
        goes_on.set()
        assert [outcome.is_durable for outcome in session.wait(300)] == [True]
    assert any(kind == "snapshot_wait" and seconds >= 0.05 for kind, seconds in stalls)


class _Listener:
    def run_changed(self, run: object, state: object) -> None: ...
