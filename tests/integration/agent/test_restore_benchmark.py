"""The parts of `make bench-restore` that start from a disk and from memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.restore import __main__ as bench

pytestmark = pytest.mark.processes


def test_a_start_from_a_disk_is_measured_where_no_memory_is_held(tmp_path: Path) -> None:
    assert bench._run("seed", 1, tmp_path / "store") == []
    (line,) = bench._run("resume", 1, tmp_path / "store", "--store", str(tmp_path / "store"))
    assert line["memory"] is False
    assert 0 < line["load"] < line["whole"]
