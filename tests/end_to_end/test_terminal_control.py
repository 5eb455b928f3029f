"""A job under its supervisor, steered from a terminal while it runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from holdfast.client import Client, JobSummary
from tests.support.eventually import PATIENCE_SECONDS, eventually
from tests.support.job_processes import HOLDFAST, TRAINER, LedgerStep, environment, known, read_ledger, spawned

pytestmark = pytest.mark.processes


@dataclass
class Running:
    """A job in full swing, with its server and its supervisor."""

    name: str
    client: Client
    ledger: Path
    store: Path
    supervisor: subprocess.Popen[bytes]

    def job(self) -> JobSummary:
        return self.client.job(self.name)

    def newest(self) -> int:
        """The iteration of the newest checkpoint to go back to: the oldest may be gone a moment later."""
        return max(row.iteration for row in self.client.checkpoints(self.name) if row.restorable)

    def steps(self) -> list[LedgerStep]:
        return read_ledger(self.ledger)

    def holdfast(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [*HOLDFAST, *arguments]
        env = environment(self.store, self.client.server)
        return subprocess.run(
            command, capture_output=True, text=True, env=env, check=False, timeout=PATIENCE_SECONDS
        )

    def wait(self, happened: Callable[[JobSummary], bool], what: str) -> JobSummary:
        eventually(lambda: happened(self.job()), what)
        return self.job()


@contextmanager
def started(name: str, client: Client, folder: Path) -> Iterator[Running]:
    ledger, store = folder / "ledger.txt", folder / "store"
    trainer = [sys.executable, str(TRAINER), str(ledger), "--job", name, "--epochs", "100000", "--every", "20",
               "--slowly"]  # fmt: skip
    with spawned([*HOLDFAST, "run", "--", *trainer], folder / "run.log", environment(store, client.server)) as run:
        eventually(
            lambda: (job := known(client, name)) is not None and job.checkpoints_total >= 2, "two checkpoints"
        )
        yield Running(name, client, ledger, store, run)


@pytest.fixture(scope="module")
def running(server: Client, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """For tests after which it goes on, and which take it as they find it: a start of torch takes seconds."""
    with started("steered", server, tmp_path_factory.mktemp("steered")) as running:
        yield running


def test_a_budget_set_in_a_terminal_is_applied_at_an_iteration(running: Running) -> None:
    told = json.loads(running.holdfast("budget", running.name, "1%", "--json").stdout)
    assert told["applied"] is True
    assert told["applied_iteration"] >= 1
    running.wait(lambda job: job.budget == 0.01, "the job to say that the budget holds")


def test_a_checkpoint_asked_for_in_a_terminal_is_durable_when_the_command_ends(running: Running) -> None:
    done = running.holdfast("checkpoint", running.name)
    assert done.returncode == 0, done.stderr
    checkpoint = done.stdout.rpartition("durable: ")[2].split(",")[0]
    assert (running.store / running.name / checkpoint / "manifest.json").exists()


def test_where_there_is_no_checkpoint_the_nearest_is_offered(running: Running) -> None:
    nearest, lineage = running.newest(), running.job().lineage
    running.wait(lambda job: job.iteration > nearest + 1, "an iteration without a checkpoint")
    refused = running.holdfast("restore", running.name, str(nearest + 1))
    assert refused.returncode == 1
    assert f"holdfast restore {running.name} {nearest}" in refused.stderr
    assert running.job().lineage == lineage


def test_a_restore_replays_the_same_losses_on_a_new_lineage(running: Running) -> None:
    target, lineage = running.newest(), running.job().lineage
    running.wait(lambda job: job.iteration > target, "an iteration that is done again")
    done = running.holdfast("restore", running.name, str(target))
    assert done.returncode == 0, done.stderr
    assert f"on lineage {lineage + 1}" in done.stdout
    eventually(lambda: len(_of_lineage(running, lineage + 1)) >= 30, "thirty iterations after the restore")

    first, again = _of_lineage(running, lineage), _of_lineage(running, lineage + 1)
    assert min(again) == target + 1
    both = first.keys() & again.keys()
    assert len(both) >= 1
    for iteration in both:
        assert first[iteration].outcome == again[iteration].outcome, f"iteration {iteration} differs"
    assert len({step.pid for step in running.steps()}) == 1, "the restore was in place"
    assert running.job().lineage == lineage + 1


def test_ctrl_c_ends_supervisor_and_trainer_and_the_server_is_told(server: Client, tmp_path: Path) -> None:
    with started("interrupted", server, tmp_path) as running:
        pid = running.steps()[-1].pid
        running.supervisor.send_signal(signal.SIGINT)
        assert running.supervisor.wait(PATIENCE_SECONDS) == 128 + signal.SIGINT
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        ended = running.wait(lambda job: not job.alive, "the server to know")
        assert ended.status in ("finished", "stopped", "failed")


def _of_lineage(running: Running, lineage: int) -> dict[int, LedgerStep]:
    return {step.iteration: step for step in running.steps() if step.lineage == lineage}
