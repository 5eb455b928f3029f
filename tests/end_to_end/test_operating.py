"""A job under its supervisor, steered from a terminal while it runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from stage import HOLDFAST, TRAINER, Step, environment, known, read_ledger, spawned, until

from holdfast.client import Client, Job

pytestmark = pytest.mark.processes

JOB = "ledger"


@dataclass
class Running:
    """A job in full swing, with its server and its supervisor."""

    client: Client
    ledger: Path
    store: Path
    supervisor: subprocess.Popen[bytes]

    def job(self) -> Job:
        return self.client.job(JOB)

    def steps(self) -> list[Step]:
        return read_ledger(self.ledger)

    def holdfast(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [*HOLDFAST, *arguments]
        env = environment(self.store, self.client.server)
        return subprocess.run(command, capture_output=True, text=True, env=env, check=False, timeout=60)

    def wait(self, happened: Callable[[Job], bool], what: str) -> Job:
        until(lambda: happened(self.job()), what)
        return self.job()


@pytest.fixture
def running(tmp_path: Path, server: Client) -> Iterator[Running]:
    ledger, store = tmp_path / "ledger.txt", tmp_path / "store"
    trainer = [sys.executable, str(TRAINER), str(ledger), "--epochs", "100000", "--every", "20", "--slowly"]
    command = [*HOLDFAST, "run", "--", *trainer]
    with spawned(command, tmp_path / "run.log", environment(store, server.server)) as supervisor:
        until(lambda: (job := known(server, JOB)) is not None and job.checkpoints_total >= 2, "two checkpoints")
        yield Running(server, ledger, store, supervisor)


def test_a_budget_set_in_a_terminal_is_applied_at_an_iteration(running: Running) -> None:
    told = json.loads(running.holdfast("budget", JOB, "1%", "--json").stdout)
    assert told["applied"] is True
    assert told["applied_iteration"] >= 1
    running.wait(lambda job: job.budget == 0.01, "the job to say that the budget holds")


def test_a_checkpoint_asked_for_in_a_terminal_is_durable_when_the_command_ends(running: Running) -> None:
    done = running.holdfast("checkpoint", JOB)
    assert done.returncode == 0, done.stderr
    checkpoint = done.stdout.rpartition("durable: ")[2].split(",")[0]
    assert (running.store / JOB / checkpoint / "manifest.json").exists()


def test_a_restore_replays_the_same_losses_on_a_new_lineage(running: Running) -> None:
    target = running.client.checkpoints(JOB)[-1].iteration
    done = running.holdfast("restore", JOB, str(target))
    assert done.returncode == 0, done.stderr
    assert "on lineage 2" in done.stdout
    until(lambda: len(_of_lineage(running, 2)) >= 30, "thirty iterations after the restore")

    first, again = _of_lineage(running, 1), _of_lineage(running, 2)
    assert min(again) == target + 1
    both = first.keys() & again.keys()
    assert len(both) >= 1
    for iteration in both:
        assert first[iteration].outcome == again[iteration].outcome, f"iteration {iteration} differs"
    assert len({step.pid for step in running.steps()}) == 1, "the restore was in place"
    assert running.job().lineage == 2


def test_where_there_is_no_checkpoint_the_nearest_is_offered(running: Running) -> None:
    points = sorted(row.iteration for row in running.client.checkpoints(JOB))
    refused = running.holdfast("restore", JOB, str(points[0] + 1))
    assert refused.returncode == 1
    assert f"holdfast restore {JOB} {points[0]}" in refused.stderr
    assert running.job().lineage == 1


def test_ctrl_c_ends_supervisor_and_trainer_and_the_server_is_told(running: Running) -> None:
    pid = running.steps()[-1].pid
    running.supervisor.send_signal(signal.SIGINT)
    assert running.supervisor.wait(30) == 128 + signal.SIGINT
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    ended = running.wait(lambda job: not job.alive, "the server to know")
    assert ended.status in ("finished", "stopped", "failed")


def _of_lineage(running: Running, lineage: int) -> dict[int, Step]:
    return {step.iteration: step for step in running.steps() if step.lineage == lineage}
