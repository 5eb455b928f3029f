"""Training that an operator pauses, continues and ends, under `holdfast run`, with one rank and with three."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast.client import Client
from tests.support.eventually import PATIENCE_SECONDS, eventually
from tests.support.job_processes import HOLDFAST, environment, known, spawned
from tests.support.multi_rank import RankLauncher
from tests.support.multi_rank import launcher as launcher
from tests.support.restore_faults import HERE, read
from tests.support.torchrun_trainer import ITERATIONS

pytestmark = pytest.mark.processes


@contextmanager
def running(folder: Path, server: Client, job: str, ranks: int) -> Iterator:
    """The supervisor of a job that trains."""
    torchrun = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node", str(ranks)]
    command = [*HOLDFAST, "run", "--", *torchrun, str(HERE / "torchrun_trainer.py"), str(folder), job, "paced"]
    env = environment(folder / "store", server.server) | {"OMP_NUM_THREADS": "1"}
    with spawned(command, folder / "log", env) as run:
        eventually(lambda: (seen := known(server, job)) is not None and seen.iteration > 2, "the job to train")
        yield run


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_paused_job_that_is_killed_stays_paused_and_trains_on_exactly(
    tmp_path: Path, server: Client, launcher: RankLauncher, ranks: int
) -> None:
    job = f"paused-{ranks}"

    def is_paused(attempt: int) -> bool:
        seen = server.job(job)
        return seen.attempt == attempt and seen.training_paused_at is not None

    with running(tmp_path, server, job, ranks) as run:
        server.order_training(job, "pause")
        eventually(lambda: is_paused(1), "the pause")
        at = server.job(job).last_durable.iteration
        last = read(tmp_path / f"ledger-{ranks - 1}")[-1]
        os.kill(last.pid, signal.SIGKILL)
        eventually(lambda: is_paused(2), "the pause of the next start")
        assert server.job(job).status == "paused"
        assert {read(tmp_path / f"ledger-{rank}")[-1].iteration for rank in range(ranks)} == {at}
        server.order_training(job, "continue")
        assert run.wait(PATIENCE_SECONDS) == 0
    undisturbed = launcher.run(ranks, "tests.support.torchrun_trainer.alone")
    for rank, expected in enumerate(undisturbed):
        lines = read(tmp_path / f"ledger-{rank}")
        assert [line.iteration for line in lines] == list(range(1, ITERATIONS + 1))
        assert [line.outcome for line in lines] == expected
    paused = next(each for each in server.goodput(job, "all").buckets if each.name == "paused")
    assert paused.seconds > 0


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_job_that_is_ended_is_not_started_again(tmp_path: Path, server: Client, ranks: int) -> None:
    job = f"ended-{ranks}"
    with running(tmp_path, server, job, ranks) as run:
        server.order_training(job, "end")
        assert run.wait(PATIENCE_SECONDS) == 0
    seen = server.job(job)
    at = read(tmp_path / "ledger-0")[-1].iteration
    assert at < ITERATIONS
    assert (seen.status, seen.status_reason) == ("stopped", f"ended by operator at iteration {at}")
    assert seen.last_durable.iteration == at
    assert seen.desired.training is None
    assert "restarting" not in (tmp_path / "log").read_text()


def test_sigterm_ends_a_paused_job(tmp_path: Path, server: Client) -> None:
    job = "sigterm-while-paused"
    with running(tmp_path, server, job, 3) as run:
        server.order_training(job, "pause")
        eventually(lambda: server.job(job).training_paused_at is not None, "the pause")
        run.terminate()
        assert run.wait(PATIENCE_SECONDS) == 128 + signal.SIGTERM
    seen = server.job(job)
    assert (seen.status, seen.unsaved_iterations) == ("stopped", 0)
