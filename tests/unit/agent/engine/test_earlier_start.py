"""The store of a start under a supervisor that started the script before."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.system import supervisor_channel, supervisor_files
from holdfast.system.supervisor_channel import PROGRESS_LAYOUT


class Starts:
    """Starts of a script under one supervisor, each in a working directory of its own."""

    def __init__(self, top: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        self.top, self.caplog, self.monkeypatch = top, caplog, monkeypatch
        self.folder = top / "supervisor"
        self.folder.mkdir()
        self.number = 0
        monkeypatch.setenv(supervisor_channel.VARIABLE, str(self.folder))
        monkeypatch.setenv(supervisor_channel.PROGRESS_VARIABLE, str(self.folder / "progress"))

    @property
    def directory(self) -> Path:
        return self.top / f"start-{self.number}"

    def begin(self) -> None:
        """Begin a start, as a process of its own would."""
        self.number += 1
        self.directory.mkdir()
        self.monkeypatch.chdir(self.directory)
        self.monkeypatch.setattr(supervisor_files, "_opened_stores", [])
        (self.folder / "progress").write_bytes(PROGRESS_LAYOUT.pack(0, 0))
        self.caplog.clear()

    def end(self) -> None:
        progress = PROGRESS_LAYOUT.unpack((self.folder / "progress").read_bytes())
        supervisor_files.keep_stores(self.folder, progress)

    def train(self, iterations: int, job: str = "job", *, store: str | Path | None = None, every: int = 1) -> int:
        """Train to an iteration in a session. Return the iteration that it began at."""
        model = torch.nn.Linear(2, 1)
        session = holdfast.Session(
            job, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), store=store, every=every
        )
        began = session.resume()
        while session.iteration < iterations:
            session.step()
        session.close()
        return began

    @property
    def warnings(self) -> list[str]:
        return [
            row.getMessage()
            for row in self.caplog.records
            if row.levelno == logging.WARNING and row.name == "holdfast"
        ]


@pytest.fixture
def starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Starts:
    monkeypatch.delenv("HOLDFAST_STORE", raising=False)
    monkeypatch.setattr(supervisor_channel, "enable_stack_dump", lambda rank: None)  # it keeps a file open
    return Starts(tmp_path, monkeypatch, caplog)


@pytest.mark.parametrize("given", ["default", "argument", "environment", "url"])
def test_a_relative_store_is_where_the_first_start_had_it(starts: Starts, given: str) -> None:
    store = {"argument": "out/checkpoints", "url": "file://out/checkpoints"}.get(given)
    if given == "environment":
        starts.monkeypatch.setenv("HOLDFAST_STORE", "out/checkpoints")
    starts.begin()
    assert starts.train(3, store=store) == 0
    assert starts.warnings == []
    first = starts.directory / ("checkpoints" if given == "default" else "out/checkpoints")
    starts.end()
    for reached in (3, 5):
        starts.begin()
        assert starts.train(reached + 2, store=store) == reached
        assert not list(starts.directory.iterdir()), "the later stores are not created"
        (warning,) = starts.warnings
        assert f"job: the last start trained to iteration {reached} in store {first}" in warning
        assert str(starts.directory) in warning
        starts.end()


def test_a_store_that_stays_is_not_mentioned(starts: Starts) -> None:
    for _ in range(3):
        starts.begin()
        starts.train(3 * starts.number, store=starts.top / "store")
        assert starts.warnings == []
        starts.end()


def test_a_new_store_at_an_absolute_path_is_used_and_named(starts: Starts) -> None:
    starts.begin()
    starts.train(3, store=starts.top / "first")
    starts.end()
    starts.begin()
    assert starts.train(2, store=starts.top / "second") == 0
    (warning,) = starts.warnings
    assert "trained to iteration 3" in warning
    assert str(starts.top / "first") in warning
    assert str(starts.top / "second") in warning
    starts.end()
    starts.begin()
    assert starts.train(4, store=starts.top / "second") == 2
    assert starts.warnings == []


def test_a_store_that_was_deleted_is_named(starts: Starts) -> None:
    store = starts.top / "store"
    starts.begin()
    starts.train(3, store=store)
    starts.end()
    shutil.rmtree(store)
    starts.begin()
    assert starts.train(2, store=store) == 0
    (warning,) = starts.warnings
    assert f"trained to iteration 3 in store {store}, which has no record of it: was the store deleted?" in warning


def test_a_store_that_has_become_a_file_is_named_and_the_own_one_is_used(starts: Starts) -> None:
    starts.begin()
    starts.train(3)
    starts.end()
    first = starts.directory / "checkpoints"
    shutil.rmtree(first)
    first.write_text("")
    starts.begin()
    assert starts.train(2) == 0
    (warning,) = starts.warnings
    assert "has no history of the job: the last start trained to iteration 3" in warning
    assert str(first) in warning
    assert (starts.directory / "checkpoints" / "job").is_dir()


def test_another_job_name_is_named(starts: Starts) -> None:
    store = starts.top / "store"
    for number in (1, 2):
        starts.begin()
        assert starts.train(3, f"run-{number}", store=store) == 0
        assert len(starts.warnings) == number - 1
        starts.end()
    assert f"trained job run-1 to iteration 3 in {store}" in starts.warnings[0]


def test_several_jobs_and_sessions_of_a_script_keep_their_stores(starts: Starts) -> None:
    """One name in two directories, and another job; the first start ends before the last of them."""
    for reached in (2, 4):
        starts.begin()
        for fold in ("one", "two"):
            os.makedirs(starts.directory / fold, exist_ok=True)
            os.chdir(starts.directory / fold)
            assert starts.train(reached) == reached - 2
        if starts.number == 2:
            assert starts.train(1, "evaluation") == 0
            assert starts.train(1) == 0, "a third session of the name, in a directory of the second"
        assert len(starts.warnings) == (2 if starts.number == 2 else 0)
        starts.end()
    for warning, fold in zip(starts.warnings, ("one", "two"), strict=True):
        assert f"start-1/{fold}/checkpoints" in warning


def test_a_session_that_never_trained_has_no_history_to_miss(starts: Starts) -> None:
    """The first start ended after another job had trained."""
    starts.begin()
    starts.train(5, "first", store=starts.top / "store")
    model = torch.nn.Linear(2, 1)
    session = holdfast.Session("second", model=model, store=starts.top / "store")
    session.resume()
    session.close()
    starts.end()
    starts.begin()
    assert starts.train(5, "first", store=starts.top / "store") == 5
    assert starts.train(1, "second", store=starts.top / "store") == 0
    assert starts.warnings == []


def test_without_a_supervisor_a_relative_store_follows_the_working_directory(starts: Starts) -> None:
    starts.monkeypatch.delenv(supervisor_channel.VARIABLE)
    for _ in range(2):
        starts.begin()
        assert starts.train(2) == 0
        assert (starts.directory / "checkpoints").is_dir()
        assert starts.warnings == []
