"""Three hosts, four ranks, and one host after the other is lost: the job goes on, to the bit."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from tests.support import hosts
from tests.support.hosts_job import RANKS, HostsJob, host_of
from tests.support.hosts_trainer import EVERY
from tests.support.multi_rank import RankLauncher
from tests.support.multi_rank import launcher as launcher

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(hosts.why_not() is not None, reason=str(hosts.why_not())),
]

MOMENTS = ("copying", "sealing", "sending", "sent half", "committing", "restarting", "any")
FULL_FROM = 10
LEASH = 4 * EVERY
"""Iterations that each attempt may train before its host is lost."""


def assert_exact(job: HostsJob, launcher: RankLauncher, iterations: int) -> None:
    undisturbed = launcher.run(RANKS, "tests.support.hosts_trainer.alone", iterations=iterations)
    for rank, expected in enumerate(undisturbed):
        lines = job.ledger(rank)
        assert [line for line in lines if line.outcome != expected[line.iteration - 1]] == []
        assert {line.iteration for line in lines} == set(range(1, iterations + 1))


def lose_host_at(job: HostsJob, moment: str, rank: int, attempt: int, start: int) -> int:
    """Lose the host of a rank; return the iteration that every rank had sent before."""
    if moment in ("any", "restarting"):
        job.train_to(start + LEASH)
        job.wait_for(start + 2 * EVERY + 1, attempt)
        time.sleep(random.uniform(0, 0.2))
    else:
        job.strike(rank, moment, start + 2 * EVERY)
        job.train_to(start + LEASH)
        job.wait_until_struck()
    sent = job.sent()
    job.lose(host_of(rank))
    if moment == "restarting":
        job.strike(rank, moment)
        job.train_to(start + LEASH + 1)  # the others notice when they train on
        job.wait_until_struck()
        job.lose(host_of(rank))
    return sent


def test_without_memory_of_other_hosts_the_store_is_read(tmp_path: Path, launcher: RankLauncher) -> None:
    with HostsJob(tmp_path, 30, torchrun=True) as job:
        job.train_to(20)
        job.wait_for(20, attempt=1)
        job.train_to(30)
        job.lose(1)
        assert job.wait() == [0, 0, 0]
        assert "do not run under one supervisor" in job.log()
        assert 15 <= job.resumed_at(2) <= 30
        assert job.store_reads() == RANKS
        assert_exact(job, launcher, 30)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("count", [2, pytest.param(40, marks=pytest.mark.long)])
def test_what_all_ranks_have_sent_is_not_lost_with_a_host(
    tmp_path: Path, launcher: RankLauncher, count: int
) -> None:
    seed = int(os.environ.get("HOLDFAST_TEST_SEED", time.time_ns() % 2**32))
    print(f"repeat these losses with HOLDFAST_TEST_SEED={seed}")
    random.seed(seed)
    losses = [(random.choice(MOMENTS), random.randrange(RANKS)) for _ in range(count)]
    iterations = (count + 1) * LEASH
    with HostsJob(tmp_path, iterations, FULL_FROM, HOLDFAST_PEERS="1") as job:
        attempt, start = 1, 0
        for number, (moment, rank) in enumerate(losses, 1):
            print(f"attempt {attempt} from iteration {start}: the host of rank {rank} is lost: {moment}")
            sent = lose_host_at(job, moment, rank, attempt, start)
            job.train_to(iterations if number == count else start + LEASH)
            job.wait_for(0, attempt + 1)
            attempt = job.attempt
            start = job.resumed_at(attempt)
            assert start >= sent >= EVERY
        assert job.wait() == [0, 0, 0]
        assert job.log().count("(kept in memory by `holdfast run`") == count
        assert job.store_reads() == 0
        assert_exact(job, launcher, iterations)
