"""A run of many tests whose worker dies: it ends, says so, and leaves no other test out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = """
from tests.support.xdist_scheduler import FileScheduler

def pytest_xdist_make_scheduler(config, log):
    return FileScheduler(config, log)
"""
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "xdist"]
GREEN = "def test_one(): ...\n\ndef test_two(): ...\n"
DEADLY = "import os\n\ndef test_before(): ...\n\ndef test_dies():\n    os._exit(9)\n\ndef test_after(): ...\n"


@pytest.mark.processes
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("last", [False, True])
def test_a_run_whose_worker_dies_ends_and_is_red_for_that_test_alone(
    tmp_path: Path, workers: int, last: bool
) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for number in range(5):
        (tmp_path / f"test_green_{number}.py").write_text(GREEN)
    (tmp_path / ("test_zz.py" if last else "test_green_2_dies.py")).write_text(DEADLY)
    here = Path(__file__).resolve().parents[3]
    ended = subprocess.run(
        [*PYTEST, "-n", str(workers), "--dist", "loadfile", "--no-loadscope-reorder"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(here), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert ended.stdout.splitlines()[-1].startswith("1 failed, 12 passed"), ended.stdout
    assert "test_dies" in ended.stdout
