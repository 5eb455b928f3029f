"""The estimate of the space that checkpoints will take."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import holdfast
from holdfast.checkpoint import restore
from holdfast.protocol.ids import checkpoint_id
from holdfast.retention import parse_retention
from holdfast.save.layout import estimate_checkpoint_bytes
from holdfast.save.reports import CheckpointEvents
from holdfast.save.run import CopyResult, RunState, WriteResult
from holdfast.store import LocalStore, open_store
from holdfast.system.files import Files
from holdfast.telemetry.reporter import Reporter, TrainingPosition
from holdfast.testing.small_checkpoints import FIRST, JOB, SECOND, commit
from tests.support.eventually import eventually

GB = 10**9


class FilesWithRoom(Files):
    """The real files, on a disk with this much space."""

    def __init__(self, free_bytes: int | None) -> None:
        super().__init__()
        self._free_bytes = free_bytes

    def free_bytes(self, path: Path) -> int:
        if self._free_bytes is None:
            raise OSError(5, "no such share")
        return self._free_bytes


def events(root: Path, free_bytes: int | None) -> CheckpointEvents:
    store = LocalStore(root, FilesWithRoom(free_bytes))
    return CheckpointEvents(Reporter(JOB, TrainingPosition()), store)


def lines(caplog: pytest.LogCaptureFixture) -> tuple[list[str], list[str]]:
    """(information, warnings)"""
    found: dict[int, list[str]] = {logging.INFO: [], logging.WARNING: []}
    for record in caplog.records:
        found[record.levelno].append(record.getMessage())
    return found[logging.INFO], found[logging.WARNING]


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ("spaced 12", "keeps up to 16.8 GB (12 checkpoints)"),
        ("last 2, best 3 by loss", "keeps up to 7 GB (5 checkpoints)"),
        ("last 1", "keeps up to 1.4 GB"),
        ("size 10GB", "keeps up to 10 GB"),
        ("spaced 100, size 10GB", "keeps up to 10 GB (100 checkpoints)"),
        ("every 1000", "sets no limit"),
        ("last 3, per lineage", "sets no limit"),
    ],
)
def test_the_log_says_what_checkpoints_will_take(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, rules: str, said: str
) -> None:
    caplog.set_level("INFO", "holdfast")
    events(tmp_path, 92 * GB).report_space(JOB, round(1.4 * GB), parse_retention(rules))
    canonical = str(parse_retention(rules))
    line = f"{JOB}: a checkpoint takes about 1.4 GB; retention '{canonical}' {said}; {tmp_path} has 92 GB free"
    assert lines(caplog) == ([line], [])


@pytest.mark.parametrize(
    ("rules", "most"), [("spaced 12", 13), ("last 4", 5), ("every 1000", 2), ("size 9GB", 10), ("last 1", 2)]
)
def test_a_store_without_room_for_them_and_the_one_being_written_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, rules: str, most: int
) -> None:
    events(tmp_path, most * GB).report_space(JOB, GB, parse_retention(rules))
    assert lines(caplog)[1] == []
    events(tmp_path, most * GB - 1).report_space(JOB, GB, parse_retention(rules))
    (warning,) = lines(caplog)[1]
    assert f"and one being written need about {most} GB and {tmp_path} has " in warning
    assert "lower keep, change retention, or move the store" in warning


def test_checkpoints_that_are_there_need_no_more_room(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = open_store(tmp_path)
    store.acquire_attempt(JOB, "first")
    for checkpoint in (FIRST, SECOND):
        commit(store, checkpoint)
    rules = parse_retention("last 3")
    events(tmp_path, 2 * GB).report_space(JOB, GB, rules)
    assert lines(caplog)[1] == []
    events(tmp_path, GB).report_space(JOB, GB, rules)
    (warning,) = lines(caplog)[1]
    assert "need about 4 GB, 2 GB of which is in use, and" in warning


def test_what_all_checkpoints_share_counts_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "holdfast")
    events(tmp_path, 13 * GB).report_space(JOB, 10 * GB, parse_retention("last 3"), shared_bytes=9 * GB)
    (line,), warnings = lines(caplog)
    assert "about 10 GB, 9 GB of which all of them share; retention 'last 3' keeps up to 12 GB (3 " in line
    assert warnings == []
    events(tmp_path, 12 * GB).report_space(JOB, 10 * GB, parse_retention("last 3"), shared_bytes=9 * GB)
    (warning,) = lines(caplog)[1]
    assert "one being written need about 13 GB and" in warning


def test_a_session_counts_frozen_weights_once_and_says_that_sizes_are_those_before_compression(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "holdfast")
    model = torch.nn.Sequential(torch.nn.Linear(700, 700).requires_grad_(False), torch.nn.Linear(700, 1))
    optimizer = torch.optim.AdamW(model[1].parameters())
    with holdfast.Session(
        "job", store=tmp_path, keep=4, compress=True, model=model, optimizer=optimizer
    ) as session:
        model(torch.ones(2, 700)).sum().backward()
        optimizer.step()
        session.step()
        eventually(lambda: any("a checkpoint takes about" in each for each in lines(caplog)[0]))
    (line,) = [each for each in lines(caplog)[0] if "a checkpoint takes about" in each]
    size = "about 1.99 MB before compression, 1.96 MB of which all of them share; retention 'spaced 4' keeps up to"
    assert f"{size} 2.06 MB" in line


def growth_warnings(root: Path, caplog: pytest.LogCaptureFixture, *, rules: str, seconds: float) -> list[str]:
    """Commit checkpoints of 1 GB, one every 100 iterations of `seconds`, with 92 GB free; return the warnings."""
    caplog.set_level("INFO", "holdfast")
    checkpoint_events = events(root, 92 * GB)
    captured: Any = None  # it has no size, so that the estimate for the start is left out
    for number in range(3):
        checkpoint_events.estimate_space(JOB, captured, 1, parse_retention(rules))
        draft = SimpleNamespace(
            iteration=100 * number, lineage=1, kind="scheduled", created_at=100 * number * seconds, parent=None,
            not_linked=None, encode_seconds=0.0, metrics={},
        )  # fmt: skip
        result = WriteResult(stored_bytes=GB, written_bytes=GB)
        run: Any = SimpleNamespace(
            id=checkpoint_id(100 * number, 1), draft=draft, result=result, copy=CopyResult(), size_bytes=GB,
            write_started_at=0.0, outcome=None,
        )  # fmt: skip
        checkpoint_events.run_changed(run, RunState.DURABLE)
    return lines(caplog)[1]


def test_a_start_that_fills_the_store_within_a_day_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (warning,) = growth_warnings(tmp_path, caplog, rules="last 3, every 100", seconds=6.0)
    assert warning == (
        f"{JOB}: {tmp_path} is full in about 15 h 20 min: retention keeps a checkpoint of 1 GB for good every "
        "10 min, and 92 GB are free: raise 'every 100', or add a limit such as 'size 1TB'"
    )


@pytest.mark.parametrize(
    ("rules", "seconds"),
    [("last 3, every 100", 60.0), ("every 1000", 6.0), ("spaced 12", 6.0), ("every 100, size 9GB", 6.0)],
)
def test_nothing_is_said_where_retention_bounds_what_is_kept_or_a_day_is_not_enough_to_fill_the_store(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, rules: str, seconds: float
) -> None:
    assert growth_warnings(tmp_path, caplog, rules=rules, seconds=seconds) == []


def test_where_the_free_space_is_unknown_nothing_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "holdfast")
    events(tmp_path, None).report_space(JOB, GB, parse_retention("last 3"))
    (line,), warnings = lines(caplog)
    assert line.endswith(f"{tmp_path} has an unknown amount free")
    assert warnings == []


@pytest.mark.parametrize(("parity", "size", "kept"), [("off", "1.1 MB", "4.39 MB"), ("4+2", "1.66 MB", "6.65 MB")])
def test_a_session_reports_it_once_with_the_size_that_its_checkpoints_have(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, parity: str, size: str, kept: str
) -> None:
    caplog.set_level("INFO", "holdfast")
    model = torch.nn.Linear(300, 300)
    optimizer = torch.optim.AdamW(model.parameters())
    with holdfast.Session(
        "job", store=tmp_path, every=1, keep=4, parity=parity, model=model, optimizer=optimizer
    ) as session:
        for _ in range(3):
            model(torch.ones(2, 300)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            session.step()
            session.wait(300)
        estimate, _ = estimate_checkpoint_bytes(session._training.outline(), 1)
        eventually(lambda: any("a checkpoint takes about" in each for each in lines(caplog)[0]))
    (line,) = [each for each in lines(caplog)[0] if "a checkpoint takes about" in each]
    assert line.startswith(f"job: a checkpoint takes about {size}; retention 'spaced 4' keeps up to {kept} (4 ")
    manifest = restore.manifest(open_store(tmp_path), "job", open_store(tmp_path).checkpoints("job")[-1])
    (file,) = manifest.files
    assert file.size_bytes - file.header_bytes == estimate
    assert file.stored_bytes - file.size_bytes == pytest.approx(estimate / 2, rel=0.05) or parity == "off"


@pytest.mark.parametrize(("kind", "size"), [("AdamW", "1.1 MB"), ("SGD", "376 kB")])
def test_a_session_reports_it_after_the_first_update_when_optimizers_have_their_state(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, size: str
) -> None:
    caplog.set_level("INFO", "holdfast")
    model = torch.nn.Linear(300, 300)
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=1e-3)
    with holdfast.Session("job", store=tmp_path, every=1, model=model, optimizer=optimizer) as session:
        for updates in (0, 1):
            model(torch.ones(2, 300)).sum().backward()
            if updates:
                optimizer.step()
                optimizer.zero_grad()
            session.step()
            session.wait(300)
        eventually(lambda: any("a checkpoint takes about" in each for each in lines(caplog)[0]))
    (line,) = [each for each in lines(caplog)[0] if "a checkpoint takes about" in each]
    assert f"takes about {size};" in line
