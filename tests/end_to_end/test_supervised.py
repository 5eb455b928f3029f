"""A supervisor and its job's server: orders are waited for there, and an old life that wakes up is nobody."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from stage import HOLDFAST, PATIENCE_SECONDS, TRAINER, environment, known, read_ledger, spawned, until

from holdfast.client import Client
from holdfast.store import open_store
from holdfast.supervision import EXIT_FENCED
from holdfast_server.ingest import OVERLAP_SECONDS

pytestmark = pytest.mark.processes


def supervised(ledger: Path, job: str, *options: str, trainer: tuple[str, ...] = ()) -> list[str]:
    script = [sys.executable, str(TRAINER), str(ledger), "--job", job, "--every", "5", *trainer]
    return [*HOLDFAST, "run", *options, "--", *script]


def test_a_job_that_failed_waits_for_an_order_and_goes_where_it_is_told(tmp_path: Path, server: Client) -> None:
    ledger, log, mended = tmp_path / "ledger.txt", tmp_path / "run.log", tmp_path / "mended"
    job = "waits-for-an-order"
    fails = ("--epochs", "2", "--fail-at", "38", "--unless-there-is", str(mended))
    command = supervised(ledger, job, "--starts", "1", trainer=fails)
    with spawned(command, log, environment(tmp_path / "store", server.server)) as supervisor:
        until(lambda: f"waiting for an order to restore {job}" in log.read_text(), "the supervisor to wait")
        told = [notice.message for notice in server.notices(job) if notice.code == "waits"]
        assert "The supervisor waits for an order to restore" in told[0]
        assert "without a new iteration, the last one (killed by SIGKILL) at iteration 38" in told[0]
        steps = len(read_ledger(ledger))
        mended.touch()
        order = server.restore(job, _oldest(server, job))
        assert supervisor.wait(PATIENCE_SECONDS) == 0
    done = server.order(job, order.id)
    assert [step.state for step in done.transitions] == ["requested", "restoring", "restored"]
    after = read_ledger(ledger)[steps:]
    assert [step.iteration for step in after] == list(range(order.iteration + 1, 55))
    assert f"an order to restore {order.checkpoint} has come: starting the trainer" in log.read_text()


def test_a_job_that_is_done_waits_where_that_is_wanted_and_ends_when_told_to(
    tmp_path: Path, server: Client
) -> None:
    ledger, log, job = tmp_path / "ledger.txt", tmp_path / "run.log", "stays"
    command = supervised(ledger, job, "--stay", "always", trainer=("--epochs", "1"))
    with spawned(command, log, environment(tmp_path / "store", server.server)) as supervisor:
        until(lambda: "waiting for an order" in log.read_text(), "the supervisor to wait")
        order = server.restore(job, _oldest(server, job))
        until(lambda: server.order(job, order.id).state == "restored", "the job to go back")
        until(lambda: log.read_text().count("waiting for an order") == 2, "the supervisor to wait again")
        supervisor.terminate()
        assert supervisor.wait(PATIENCE_SECONDS) == 0
    assert [step.iteration for step in read_ledger(ledger)] == [*range(1, 28), *range(order.iteration + 1, 28)]


@pytest.mark.parametrize("times", [1, pytest.param(50, marks=pytest.mark.long)])
@pytest.mark.timeout(3600)
def test_an_old_life_that_wakes_up_changes_nothing(tmp_path: Path, server: Client, times: int) -> None:
    for number in range(times):
        _wakes_up(tmp_path / str(number), server, f"wakes-{times}-{number}")


def _wakes_up(folder: Path, server: Client, job: str) -> None:
    folder.mkdir()
    ledger, log, store = folder / "old.txt", folder / "old.log", folder / "store"
    env = environment(store, server.server)
    slow = ("--epochs", "400", "--slowly")
    with spawned(supervised(ledger, job, trainer=slow), log, env) as old:
        until(lambda: len(read_ledger(ledger)) > 12, "the old one to train")
        pids = [old.pid, read_ledger(ledger)[0].pid]
        try:
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            new = supervised(folder / "new.txt", job, trainer=("--epochs", "3"))
            with open(folder / "new.log", "ab") as output:
                subprocess.run(new, env=env, stdout=output, stderr=subprocess.STDOUT, check=True)
            begun = open_store(store).attempts(job)[1].started_at
            until(lambda: time.time() > begun + OVERLAP_SECONDS + 2, "clocks that differ to make no difference")
            before, seen = _contents(store / job), _seen(server, job)
            assert seen[:3] == ("finished", 2, 81)
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        assert old.wait(PATIENCE_SECONDS) == EXIT_FENCED
    assert _contents(store / job) == before
    assert _seen(server, job) == seen
    assert "takes no more checkpoints and reports nothing" in log.read_text()
    assert "starts the trainer no more" in log.read_text()


def _oldest(server: Client, job: str) -> int:
    oldest = server.oldest_restorable(job)
    assert oldest is not None
    return oldest.iteration


def _contents(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _seen(server: Client, job: str) -> tuple[object, ...]:
    found = known(server, job)
    assert found is not None
    notices = [notice.message for notice in server.notices(job)]
    points = [(point.id, point.state) for point in server.checkpoints(job)]
    return found.status, found.attempt, found.iteration, found.lineage, found.loss, notices, points
