"""A store that is smaller than retention needs: the newest iterations are safe, and what costs least goes."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.checkpoint.retention_queue import RetentionQueue
from holdfast.store import LocalStore
from holdfast.system.files import Files

CHECKPOINT_BYTES = 125_000
"""About what a checkpoint of the model takes."""


@pytest.fixture
def capacity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How many checkpoints the store has room for, which a test may change."""
    room = [4.2]

    def free_bytes(files: Files, path: Path) -> int:
        used = 0
        for folder, _, names in os.walk(tmp_path / "s"):
            for name in names:
                with contextlib.suppress(FileNotFoundError):  # retention removes files meanwhile
                    used += os.stat(os.path.join(folder, name)).st_size
        return max(0, round(room[0] * CHECKPOINT_BYTES) - used)

    monkeypatch.setattr(Files, "free_bytes", free_bytes)
    return room


def committed(root: Path) -> list[int]:
    return [int(each.partition("-")[0]) for each in LocalStore(root / "s").checkpoints("job")]


def train(root: Path, until: int, ask_at: int = 0, **options: object) -> list[list[int]]:
    """Train with a checkpoint in each iteration; return what is in the store after each."""
    model = torch.nn.Linear(100, 250)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    there = []
    with holdfast.Session(
        "job", store=root / "s", every=1, model=model, optimizer=optimizer, **options
    ) as session:
        session.resume()
        while session.iteration < until:
            model(torch.ones(2, 100)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if session.iteration + 1 == ask_at:
                session.checkpoint()
            session.step()
            session.wait(300)
            assert session._saver.retention.wait_idle(300)
            there.append(committed(root))
        session._close("SIGKILL")
    return there


def test_the_newest_is_always_safe_and_the_rest_is_spaced(
    tmp_path: Path, capacity: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    there = train(tmp_path, 12)
    assert [each[-1] for each in there] == list(range(1, 13))
    assert all(each for each in there)
    assert len(there[-1]) == 4
    assert there[-1] != list(range(13 - len(there[-1]), 13)), "as `spaced` spaces them"
    (full,) = [each.message for each in caplog.records if "is full" in each.message]
    assert "while retention 'spaced 12' keeps 12" in full
    assert "too little for a checkpoint" not in caplog.text
    assert train(tmp_path, 14)[-1][-1] == 14


@pytest.mark.parametrize(
    "rules", ["last 12", "every 1", "last 3, every 2", "best 9 by loss", "size 1TB", "spaced 5, last 2"]
)
def test_under_any_rules_the_newest_is_safe(tmp_path: Path, capacity: list[float], rules: str) -> None:
    there = train(tmp_path, 9, retention=rules)
    assert [each[-1] for each in there] == list(range(1, 10))
    if rules == "last 12":
        assert there[-1] == list(range(10 - len(there[-1]), 10))


def test_room_that_retention_makes_during_a_write_is_used(
    tmp_path: Path, capacity: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    capacity[0] = 2.9
    measured, run, free_bytes = threading.Event(), RetentionQueue._run, Files.free_bytes
    model = torch.nn.Linear(100, 250)

    def run_late(queue: RetentionQueue) -> None:
        assert measured.wait(300)
        run(queue)

    def measure_before(files: Files, path: Path) -> int:
        found = free_bytes(files, path)
        if found < CHECKPOINT_BYTES:
            measured.set()
            assert session._saver.retention.wait_idle(300)
        return found

    monkeypatch.setattr(RetentionQueue, "_run", run_late)
    monkeypatch.setattr(Files, "free_bytes", measure_before)
    with holdfast.Session("job", store=tmp_path / "s", every=1, model=model, retention="last 1") as session:
        session.resume()
        for _ in range(3):
            session.step()
            session.wait(300)
        assert measured.is_set()
        assert committed(tmp_path)[-1] == 3


def test_what_was_asked_for_stays(tmp_path: Path, capacity: list[float]) -> None:
    there = train(tmp_path, 9, ask_at=2, retention="last 12")
    assert 2 in there[-1]
    assert there[-1][-1] == 9


def test_the_only_checkpoint_stays_if_there_is_no_room_for_another(
    tmp_path: Path, capacity: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    capacity[0] = 1.9
    there = train(tmp_path, 4)
    assert there == [[1]] * 4
    assert "too little for a checkpoint" in caplog.text
    capacity[0] = 9
    assert train(tmp_path, 2)[-1] == [1, 2]


def test_nothing_is_removed_if_that_would_not_make_enough_room(tmp_path: Path, capacity: list[float]) -> None:
    train(tmp_path, 2)
    used_bytes = sum(each.stat().st_size for each in (tmp_path / "s").rglob("*") if each.is_file())
    capacity[0] = used_bytes / CHECKPOINT_BYTES  # 1.2 times the size of a checkpoint have to be free
    assert train(tmp_path, 5) == [[1, 2]] * 3


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
def test_a_store_that_refuses_writes_whatever_is_removed_loses_two_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    train(tmp_path, 6)

    def refuse(files: Files, fd: int, data: memoryview, at: int) -> int:
        if len(data) > 50_000:
            raise OSError(error, os.strerror(error))
        return os.pwrite(fd, data, at)

    with monkeypatch.context() as patched:
        patched.setattr(Files, "write", refuse)
        there = train(tmp_path, 10)
    assert len(there[-1]) == 4
    assert there[-1][-1] == 6
    assert train(tmp_path, 8)[-1][-1] == 8


@pytest.mark.parametrize("taken", ["at once", "later"])
def test_free_space_that_does_not_grow_costs_two_at_most(
    tmp_path: Path, capacity: list[float], monkeypatch: pytest.MonkeyPatch, taken: str
) -> None:
    capacity[0] = 20
    train(tmp_path, 8, retention="last 12")
    free_bytes, delete = Files.free_bytes, LocalStore.delete

    def delete_for_another(store: LocalStore, job: str, checkpoint: str, attempt: int) -> None:
        before = free_bytes(store.files, store.root)
        delete(store, job, checkpoint, attempt)
        capacity[0] -= (free_bytes(store.files, store.root) - before) / CHECKPOINT_BYTES

    with monkeypatch.context() as patched:
        if taken == "at once":
            patched.setattr(Files, "free_bytes", lambda files, path: 0)
        else:  # another program fills the disk
            capacity[0] = 8
            patched.setattr(LocalStore, "delete", delete_for_another)
        there = train(tmp_path, 12, retention="last 12")
    assert len(there[-1]) == 6
    assert there[-1][-1] == 8
    capacity[0] = 20
    assert train(tmp_path, 9, retention="last 12")[-1][-1] == 9


def test_a_checkpoint_that_cannot_be_removed_is_named_once_and_others_go(
    tmp_path: Path, capacity: list[float], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rename = Files.rename

    def refuse(files: Files, source: Path, target: Path) -> None:
        if source.name == "000000000001-1":
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(source))
        rename(files, source, target)

    monkeypatch.setattr(Files, "rename", refuse)
    there = train(tmp_path, 9, retention="last 12")
    assert (there[-1][0], there[-1][-1]) == (1, 9)
    assert caplog.text.count("000000000001-1 cannot be removed, and stays until the next start") == 1
