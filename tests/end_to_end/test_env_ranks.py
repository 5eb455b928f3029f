"""Ranks that meet by `env://`, each under `holdfast run`: after a crash they meet again."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.harness import free_port
from tests.support.eventually import PATIENCE_SECONDS, eventually
from tests.support.job_processes import HOLDFAST, environment, spawned

pytestmark = pytest.mark.processes
TRAINER = Path(__file__).parents[1] / "support" / "env_ranks_trainer.py"
WAITS = "rank 0 still runs"


@pytest.mark.parametrize(("killed", "again"), [(1, False), (1, True), (0, False)])
def test_a_rank_that_restarts_while_the_other_is_in_an_iteration_meets_it(
    tmp_path: Path, killed: int, again: bool
) -> None:
    """`again`: the rank's supervisor is killed as well, and started again."""
    env = environment(tmp_path / "store") | {"OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    trainer = [sys.executable, str(TRAINER), str(tmp_path), str(1 - killed)]

    with ExitStack() as stack:

        def start(rank: int, log: Path) -> subprocess.Popen[bytes]:
            command = [*HOLDFAST, "run", "--stay", "never", "--", *trainer]
            return stack.enter_context(spawned(command, log, env | {"RANK": str(rank)}))

        logs = [tmp_path / f"log-{rank}" for rank in range(2)]
        ranks = [start(rank, log) for rank, log in enumerate(logs)]
        eventually((tmp_path / "held").exists, "an iteration of the other rank")
        if again:
            ranks[killed].kill()
            ranks[killed].wait()
        (started,) = tmp_path.glob(f"start-{killed}-*")
        os.kill(int(started.name.rpartition("-")[2]), signal.SIGKILL)
        if again:
            logs[killed] = tmp_path / "log-again"
            ranks[killed] = start(killed, logs[killed])
        next_start = re.compile(WAITS + ("|start 1:" if again else "|start 2:"))
        eventually(lambda: next_start.search(logs[killed].read_text()), "the next start")
        assert (WAITS in logs[killed].read_text()) is (killed == 1)
        (tmp_path / "go").touch()
        assert [rank.wait(PATIENCE_SECONDS) for rank in ranks] == [0, 0]
    assert WAITS not in logs[1 - killed].read_text()
    assert [len(list(tmp_path.glob(f"start-{rank}-*"))) for rank in range(2)] == [2, 2]
