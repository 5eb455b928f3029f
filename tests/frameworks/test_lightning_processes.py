"""Lightning scripts without a line of Holdfast, as processes: one and two ranks, SIGTERM, orders of a server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.integrations.kills import entries
from tests.support.eventually import PATIENCE_SECONDS, eventually
from tests.support.job_processes import HOLDFAST, environment, known, served, spawned

SCRIPT = [sys.executable, "-m", "tests.frameworks.lightning_script"]


def updates(log: Path, rank: int = 0) -> list[dict[str, Any]]:
    path = Path(f"{log}.{rank}")
    return [entry for entry in entries(path) if entry["event"] == "update"] if path.exists() else []


def assert_equal(log: Path, expected: Path, ranks: int) -> None:
    for rank in range(ranks):
        known = {entry["number"]: entry for entry in updates(expected, rank)}
        for entry in updates(log, rank):
            for what in ("losses", "samples"):
                assert entry[what] == known[entry["number"]][what], f"update {entry['number']} of rank {rank}"
        assert {entry["number"] for entry in updates(log, rank)} == known.keys()


def run(log: Path, env: dict[str, str], devices: int = 1) -> None:
    done = subprocess.run(
        [*SCRIPT, str(log), str(devices), "0"], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]


def test_without_a_job_in_the_environment_nothing_is_stored(tmp_path):
    run(tmp_path / "log", environment(tmp_path / "store"))
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("devices", [1, 2])
def test_sigterm_saves_the_last_update_and_the_next_start_continues_exactly(tmp_path, devices):
    env = environment(tmp_path / "store") | {"HOLDFAST_JOB": "zero-lines", "HOLDFAST_EVERY": "1000"}
    run(tmp_path / "whole", env | {"HOLDFAST_JOB": "whole"}, devices)
    log = tmp_path / "log"
    with spawned([*SCRIPT, str(log), str(devices), "0.1"], tmp_path / "output", env, group=0) as process:
        eventually(lambda: len(updates(log)) >= 3, "three updates")
        os.killpg(process.pid, signal.SIGTERM)  # to all ranks and workers, as many schedulers do
        assert process.wait(PATIENCE_SECONDS) == 143
    last = updates(log)[-1]["number"]
    run(log, env, devices)
    assert [entry["number"] for entry in updates(log)].count(last) == 1, "the update before SIGTERM was saved"
    assert_equal(log, tmp_path / "whole", devices)


def test_a_restore_that_an_operator_orders_restarts_the_script(tmp_path):
    log = tmp_path / "log"
    with served(tmp_path) as server:
        env = environment(tmp_path / "store", server.server) | {"HOLDFAST_JOB": "ordered", "HOLDFAST_EVERY": "2"}
        command = [*HOLDFAST, "run", "--stay", "never", "--", *SCRIPT, str(log), "1", "0.3"]
        with spawned(command, tmp_path / "output", env) as process:
            eventually(lambda: len(updates(log)) >= 6, "six updates")
            eventually(lambda: known(server, "ordered") is not None, "the job to be known")
            eventually(lambda: server.oldest_restorable("ordered") is not None, "a checkpoint to go back to")
            ordered = subprocess.run(
                [*HOLDFAST, "restore", "ordered", "3", "--nearest"],
                env=env,
                capture_output=True,
                text=True,
                check=False,
            )
            assert ordered.returncode == 0, ordered.stderr
            assert process.wait(PATIENCE_SECONDS) == 0
    numbers = [entry["number"] for entry in updates(log)]
    assert numbers.count(4) >= 2
    assert numbers[-1] == 24
    by_number: dict[int, Any] = {}
    for entry in updates(log):
        seen = entry["losses"], entry["samples"]
        assert by_number.setdefault(entry["number"], seen) == seen
