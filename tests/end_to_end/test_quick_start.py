"""The README's quick start with real processes: kill, resume, restore, undo."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from holdfast.client import Client
from tests.support.eventually import eventually
from tests.support.job_processes import HOLDFAST, TRAINER, LedgerStep, environment, known, read_ledger, spawned

JOB = "first-minutes"


def test_a_job_is_killed_resumes_is_restored_and_the_restore_is_undone(server: Client, tmp_path: Path) -> None:
    ledger, env = tmp_path / "ledger.txt", environment(tmp_path / "store", server.server)
    trainer = [
        sys.executable,
        str(TRAINER),
        str(ledger),
        "--job",
        JOB,
        "--epochs",
        "100000",
        "--every",
        "20",
        "--slowly",
    ]

    def holdfast(*arguments: str) -> str:
        done = subprocess.run([*HOLDFAST, *arguments], capture_output=True, text=True, env=env, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def steps(lineage: int) -> list[LedgerStep]:
        return [step for step in read_ledger(ledger) if step.lineage == lineage]

    with spawned([*HOLDFAST, "run", "--", *trainer], tmp_path / "run.log", env):
        eventually(
            lambda: (job := known(server, JOB)) is not None and job.checkpoints_total >= 2, "two checkpoints"
        )
        first = steps(1)[-1].pid
        os.kill(first, signal.SIGKILL)
        eventually(lambda: steps(1)[-1].pid != first, "an iteration of the second attempt")
        resumed = next(step.iteration for step in steps(1) if step.pid != first)
        assert resumed > 20, "it resumed from a checkpoint, and those are 20 iterations apart"
        target = max(row.iteration for row in server.checkpoints(JOB) if row.restorable)
        eventually(lambda: steps(1)[-1].iteration > target, "an iteration that is repeated after the restore")

        assert "on lineage 2" in holdfast("restore", JOB, str(target))
        eventually(lambda: len(steps(2)) >= 10, "ten iterations after the restore")
        assert "on lineage 3" in holdfast("undo", JOB)
        eventually(lambda: len(steps(3)) >= 10, "ten iterations after the undo")

    losses: dict[int, tuple[str, tuple[int, ...]]] = {}
    for step in read_ledger(ledger):
        assert losses.setdefault(step.iteration, step.outcome) == step.outcome, f"{step} differs"
    assert steps(2)[0].iteration == target + 1
    assert steps(3)[0].iteration > target + 1
    assert sorted(losses) == list(range(1, max(losses) + 1))
