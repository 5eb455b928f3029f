"""`holdfast doctor` on several ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.multi_rank import RankLauncher

pytestmark = pytest.mark.processes
WORKLOAD = "tests.support.doctor_workloads.examined"


def test_ranks_of_two_hosts_examine_one_store_and_each_disk(launcher: RankLauncher, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    hosts, stores = ["a", "a", "b"], [str(tmp_path / "store")] * 3
    results = launcher.run(3, WORKLOAD, hosts=hosts, stores=stores, disk=str(disk))
    assert results[0] == results[1] == results[2]
    ranks_of = {check: [rank for name, _, rank, _ in results[0] if name == check] for check, *_ in results[0]}
    assert ranks_of["store write"] == ranks_of["store read"] == ranks_of["hosts"] == [0, 1, 2]
    assert ranks_of["local disk write"] == ranks_of["memory"] == ranks_of["clock"] == [0, 2]
    assert ranks_of["store fencing"] == [0]
    states = {check: state for check, state, *_ in results[0]}
    assert states.pop("hosts") == "warning"  # two ranks on one host, one on the other
    assert set(states.values()) == {"ok", "skipped"}
    assert sorted(os.listdir(tmp_path)) == ["disk"]


def test_a_store_that_one_rank_does_not_share_is_named(launcher: RankLauncher, tmp_path: Path) -> None:
    stores = [str(tmp_path / "shared"), str(tmp_path / "shared"), str(tmp_path / "of-its-own")]
    results = launcher.run(3, WORKLOAD, hosts=["a", "a", "b"], stores=stores, disk=str(tmp_path))
    (problem,) = [each for each in results[0] if each[0] == "store write"]
    assert problem[1:3] == ("problem", 2)
    assert "all ranks need the same store" in problem[3]


def test_torchrun_starts_it_on_every_rank(tmp_path: Path) -> None:
    torchrun = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node", "2"]
    options = [str(tmp_path / "store"), "--disk", str(tmp_path), "--size", "1MB", "--json"]
    done = subprocess.run(
        [*torchrun, "-m", "holdfast", "doctor", *options],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {each["rank"] for each in found if each["check"] == "store write"} == {0, 1}
    assert next(each["measured"] for each in found if each["check"] == "hosts") == "2 ranks on 1 host"
