"""Two minutes of the soak: jobs under random faults and orders end with the losses of undisturbed runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.job_processes import environment

pytestmark = [pytest.mark.processes, pytest.mark.long, pytest.mark.timeout(3600)]
ROOT = Path(__file__).parents[2]
JOBS = ["ddp", "loader", "drain", "fork"]


def test_nothing_is_wrong_after_two_minutes(tmp_path):
    results = tmp_path / "results.jsonl"
    soak = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.soak", "--minutes", "2", "--fault-seconds", "10", "--jobs", *JOBS),
            *("--stall-seconds", "900", "--results", str(results)),
        ],
        cwd=ROOT, env=environment(tmp_path), capture_output=True, text=True,  # in /tmp: paths of sockets are short
    )  # fmt: skip
    assert soak.returncode == 0, soak.stdout + soak.stderr
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    assert {row["job"] for row in rows if row["what"] == "job"} == set(JOBS)
    assert next(row["found"] for row in rows if row["what"] == "wrong") == []
