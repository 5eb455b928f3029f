"""`holdfast run -- torchrun …`: a rank that dies, or hangs, costs the iterations since the last checkpoint."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest

from holdfast.checkpoint import restore
from holdfast.client import Client
from holdfast.store import open_store
from tests.support.eventually import PATIENCE_SECONDS
from tests.support.job_processes import environment, spawned
from tests.support.multi_rank import RankLauncher
from tests.support.multi_rank import launcher as launcher
from tests.support.restore_faults import HERE, read
from tests.support.torchrun_trainer import DIES_AT, EVERY, HANGS_AT, ITERATIONS
from tests.support.trial_pool import LONG

pytestmark = [pytest.mark.processes, *LONG]

IMPATIENT = """
import functools
from holdfast import cli; from holdfast.supervisor import supervisor
supervisor.RestartLimits = functools.partial(supervisor.RestartLimits, hang_least_seconds=3.0)
cli.main()
"""
"""`holdfast`, but that a hang is one after seconds, and not after ten minutes."""


@pytest.mark.parametrize("ends", [["hangs"], ["dies", "hangs"]])
def test_a_rank_that_dies_or_hangs_is_started_again_and_goes_on_as_if_nothing_had_been(
    tmp_path: Path, server: Client, launcher: RankLauncher, ends: list[str]
) -> None:
    job = f"torchrun-{len(ends)}"
    torchrun = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node", "2"]
    trainer = [str(HERE / "torchrun_trainer.py"), str(tmp_path), job, *ends]
    command = [sys.executable, "-c", IMPATIENT, "run", "--hang", "5", "--", *torchrun, *trainer]
    env = environment(tmp_path / "store", server.server) | {"OMP_NUM_THREADS": "1"}
    with spawned(command, log := tmp_path / "log", env) as run:
        assert run.wait(PATIENCE_SECONDS) == 0
    said = log.read_text()
    assert ("the trainer ended (exit status 1)" in said) is ("dies" in ends)
    assert "because it hung" in said

    undisturbed = launcher.run(2, "tests.support.torchrun_trainer.alone")
    for rank, expected in enumerate(undisturbed):
        lines = read(tmp_path / f"ledger-{rank}")
        assert [line for line in lines if line.outcome != expected[line.iteration - 1]] == []
        lives: dict[int, list[int]] = {}
        for line in lines:
            lives.setdefault(line.attempt, []).append(line.iteration)
        assert len(lives) == len(ends) + 1
        last = {"dies": DIES_AT, "hangs": HANGS_AT}
        assert [life[-1] for life in lives.values()] == [*map(last.__getitem__, ends), ITERATIONS]
        for before, after in itertools.pairwise(lives.values()):
            assert EVERY < after[0] <= before[-1] + 1
            assert after == list(range(after[0], after[-1] + 1))
    store = open_store(tmp_path / "store")
    assert restore.verify(store, job, store.checkpoints(job)[-1]).iteration == ITERATIONS

    told = [notice.message for notice in server.notices(job) if notice.code == "hang"]
    stacks = {each.partition(":")[0]: each for each in told if each.startswith("rank ")}
    assert len(told) == 3
    assert sorted(stacks) == ["rank 0", "rank 1"]
    assert [rank for rank, each in stacks.items() if "in stuck_for_ever" in each] == ["rank 1"]
    print(f"torchrun: {len(lives)} lives of 2 ranks, the stacks of both on the timeline, 0 trajectories off")
