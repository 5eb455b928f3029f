"""Three hosts, four ranks, and one host is lost: the job goes on with another one in its place, to the bit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support import hosts
from tests.support.hosts_job import RANKS, HostsJob
from tests.support.multi_rank import RankLauncher
from tests.support.multi_rank import launcher as launcher

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(hosts.why_not() is not None, reason=str(hosts.why_not())),
]

ITERATIONS = 40


def assert_exact(job: HostsJob, launcher: RankLauncher, iterations: int) -> None:
    undisturbed = launcher.run(RANKS, "tests.support.hosts_trainer.alone", iterations=iterations)
    for rank, expected in enumerate(undisturbed):
        lines = job.ledger(rank)
        assert [line for line in lines if line.outcome != expected[line.iteration - 1]] == []
        assert {line.iteration for line in lines} == set(range(1, iterations + 1))


def test_without_memory_of_peers_the_store_is_read(tmp_path: Path, launcher: RankLauncher) -> None:
    with HostsJob(tmp_path, ITERATIONS) as job:
        job.wait_for(ITERATIONS // 2, attempt=1)
        job.lose(1)
        assert job.wait() == [0, 0, 0]
    assert "do not run under one supervisor" in job.log()
    (start,) = re.findall(r"attempt 2 resumed from iteration (\d+)", job.log())
    assert ITERATIONS // 2 - 10 <= int(start) <= ITERATIONS
    assert_exact(job, launcher, ITERATIONS)
