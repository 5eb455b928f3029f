"""A fork goes on as the other job did, knows where it comes from, and needs nothing of it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.client import Client
from holdfast.store import open_store
from tests.support.eventually import PATIENCE_SECONDS
from tests.support.job_processes import HOLDFAST, TRAINER, LedgerStep, environment, read_ledger

pytestmark = pytest.mark.processes


def train(folder: Path, job: str, server: str) -> list[LedgerStep]:
    """One epoch of 27 iterations, from where the job stands; what was done."""
    ledger = folder / f"{job}.txt"
    command = [sys.executable, str(TRAINER), str(ledger), "--job", job, "--every", "5", "--epochs", "1"]
    env = environment(folder / "store", server)
    subprocess.run(command, env=env, check=True, capture_output=True, timeout=PATIENCE_SECONDS)
    return read_ledger(ledger)


def test_a_fork_is_made_told_and_trained_without_the_other_job(tmp_path: Path, server: Client) -> None:
    whole = train(tmp_path, "parent", server.server)
    at = open_store(tmp_path / "store").checkpoints("parent")[0]
    iteration = int(at[:12])
    command = [*HOLDFAST, "fork", "parent", str(iteration), "child", "--json"]
    env = environment(tmp_path / "store", server.server)
    done = subprocess.run(command, env=env, check=True, capture_output=True, timeout=PATIENCE_SECONDS)
    made = json.loads(done.stdout)
    assert (made["reported"], made["new"], made["origin"]["job"]) == (True, True, "parent")
    (fork,) = server.forks("parent").forks
    assert (fork.job, fork.iteration, fork.lineage) == ("child", iteration, 2)
    seen = server.job("child")
    assert (seen.status, seen.status_reason, seen.iteration) == (
        "stopped",
        f"forked at iteration {iteration}",
        iteration,
    )
    (copy,) = server.checkpoints("child")
    assert (copy.id, copy.state) == (at, "durable")
    assert copy.payload_bytes == next(row for row in server.checkpoints("parent") if row.id == at).payload_bytes
    shutil.rmtree(tmp_path / "store" / "parent")
    steps = train(tmp_path, "child", server.server)
    assert [step.outcome for step in steps] == [step.outcome for step in whole if step.iteration > iteration]
    seen = server.job("child")
    assert (seen.status, seen.iteration, seen.lineage, seen.attempt) == ("finished", 27, 2, 2)
    origin = server.forks("child").origin
    assert origin is not None
    assert (origin.job, origin.iteration, origin.digest) == ("parent", iteration, made["origin"]["digest"])
