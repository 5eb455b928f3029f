"""Where a job would go on from if it ended now, as the agent reports it and its next start proves."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from holdfast.client import Client
from tests.support.eventually import PATIENCE_SECONDS, eventually
from tests.support.job_processes import HOLDFAST, TRAINER, environment, known, read_ledger, spawned

ITERATIONS = 54
"""Of two epochs."""

pytestmark = [pytest.mark.processes, pytest.mark.skipif(sys.platform != "linux", reason="memory needs Linux")]


def test_memory_of_a_supervised_job_is_reported_and_outlives_its_process(tmp_path: Path, server: Client) -> None:
    ledger, log, killed = tmp_path / "ledger.txt", tmp_path / "run.log", tmp_path / "killed"
    job = "recovery-places"
    trainer = [
        sys.executable,
        str(TRAINER),
        str(ledger),
        "--epochs",
        "2",
        "--every",
        "5",
        "--workers",
        "0",
        "--slowly",
    ]
    run = [*HOLDFAST, "run", "--no-warm", "--", *trainer, "--job", job, "--until-there-is", str(killed)]

    def reported() -> bool:
        found = known(server, job)
        if found is None or found.iteration < ITERATIONS:  # the script waits after the last one
            return False
        memory, store = server.recovery(job).sources
        assert (memory.place, store.place) == ("memory", "store")
        assert store.note in ("no durable checkpoint", str(tmp_path / "store"))
        return memory.iteration is not None and memory.iteration == store.iteration

    with spawned(run, log, environment(tmp_path / "store", server.server)) as supervisor:
        eventually(reported, "the newest snapshot in memory and in the store")
        memory, _ = server.recovery(job).sources
        os.kill(read_ledger(ledger)[-1].pid, signal.SIGKILL)
        killed.touch()
        assert supervisor.wait(PATIENCE_SECONDS) == 0
    assert f"resumed from iteration {memory.resumes_from:,} (kept in memory" in log.read_text()
    memory, store = server.recovery(job).sources
    assert (memory.iteration, memory.note) == (None, "freed when the job ended")
    assert store.iteration == store.resumes_from == ITERATIONS
