"""Ray Train restarts a killed worker: the run is exact, and Ray knows the durable checkpoints."""

import json
import os
import subprocess
import sys

from holdfast.checkpoint import restore
from holdfast.store import open_store

QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5"}
SCRIPT = "tests.frameworks.ray_script"


def start(folder, kill, *launcher):
    folder.mkdir()
    environment = os.environ | QUIET | {"OMP_NUM_THREADS": "1"}
    for name in ("RANK", "WORLD_SIZE"):
        environment.pop(name, None)
    command = [sys.executable, "-m", *launcher, SCRIPT, str(folder), str(kill)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout


def updates(folder, rank):
    return [json.loads(line) for line in (folder / f"log.{rank}").read_text().splitlines()]


def test_a_killed_worker_changes_no_loss_and_ray_refers_to_the_checkpoints_of_the_store(tmp_path):
    start(tmp_path / "whole", 0, "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m")
    found = json.loads(start(tmp_path / "killed", 20).splitlines()[-1])
    for rank in range(2):
        expected = {number: rest for number, *rest in updates(tmp_path / "whole", rank)}
        trained = updates(tmp_path / "killed", rank)
        assert {number for number, *_ in trained} == set(expected) == set(range(1, 37))
        assert [number for number, *rest in trained if rest != expected[number]] == []
        assert [number for number, *_ in trained].count(20) == 2, "resumed before the update of the kill"
        assert [number for number, *_ in trained].count(1) == 1

    store = tmp_path / "killed" / "store"
    assert found["newest"] == {"store": str(store), "job": "ray", "checkpoint": "000000000036-1"}
    assert found["best"] == found["newest"], "Ray keeps one"
    last = float.fromhex(updates(tmp_path / "killed", 0)[-1][1])
    assert found["metrics"] == {"loss": last, "iteration": 36}
    opened = open_store(found["newest"]["store"])
    assert restore.verify(opened, found["newest"]["job"], found["newest"]["checkpoint"]).iteration == 36
    checkpoints = opened.checkpoints("ray")
    assert len(checkpoints) > 1, "Ray deletes references, not checkpoints"
    references = sorted(path.name for path in (tmp_path / "killed" / "ray" / "run").glob("checkpoint_ray_*"))
    # Ray keeps one. A reference that was written but not reported, at the kill or at the end, stays as well.
    assert references[-1] == "checkpoint_ray_000000000036-1"
    assert len(references) <= 3 < len(checkpoints)
