"""Real ranks tell a real server what they took, and it tells which of them the others wait for."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.client import Client
from tests.support import slow_rank_workload
from tests.support.multi_rank import RankLauncher
from tests.support.multi_rank import launcher as launcher

pytestmark = pytest.mark.processes


def test_the_rank_that_the_other_waits_for_is_named(
    launcher: RankLauncher, server: Client, tmp_path: Path
) -> None:
    done = launcher.run(2, "tests.support.slow_rank_workload.train", server=server.server, store=str(tmp_path))
    assert done == [{"iteration": slow_rank_workload.ITERATIONS}] * 2
    answer = server.get("/jobs/two-ranks/ranks")
    job = server.job("two-ranks")
    assert [(row["rank"], row["iterations"]) for row in answer["ranks"]] == [(1, 20), (0, 20)]
    assert (answer["world_size"], answer["stragglers"], answer["waited_for"]) == (2, [1], 1)
    assert answer["ranks"][0]["cause"] == "its own work"
    assert answer["waiting_gpu_seconds"] > slow_rank_workload.EXTRA_SECONDS / 2
    # Nothing but these sums comes from rank 1: what there is to tell of the job, rank 0 tells.
    assert (job.iteration, job.attempt, job.restarts) == (20, 1, 0)
    # With its vote for each commit it told rank 0 what its own part took.
    durable = [row for row in server.timeline("two-ranks").checkpoints if row.state == "durable"]
    assert durable
    for row in durable:
        assert sorted(span.rank for span in row.ranks) == [0, 1]
        assert all(span.persist_seconds > 0 for span in row.ranks)
