"""A supervisor with a server: it waits for restore requests, and an attempt that was fenced does nothing."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import random
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast.client import Client
from holdfast.store import Attempt, Lineage, open_store
from holdfast.system.supervisor_channel import EXIT_FENCED
from holdfast_server.ingest.transaction import OVERLAP_SECONDS
from tests.support.eventually import PATIENCE_SECONDS, eventually
from tests.support.job_processes import HOLDFAST, TRAINER, environment, known, read_ledger, spawned
from tests.support.restore_faults import HERE, read
from tests.support.trial_pool import LONG

pytestmark = pytest.mark.processes

AT_ONCE = 3
CRASH_LOOP = """
import pathlib, sys, time
import torch
import holdfast

job, again = sys.argv[1], pathlib.Path(sys.argv[2])
begun = again.with_name("begun")
while begun.exists() and not again.exists():
    time.sleep(0.05)
begun.touch()
session = holdfast.Session(job, model=torch.nn.Linear(1, 1), every=1)
session.resume()
while session.iteration < 3:
    session.step()
session.wait(60)  # lines of the log from other threads would come between those of the traceback
raise RuntimeError("CUDA out of memory, said the script")
"""
"""Trains three iterations once; later starts wait for a file before they fail again."""


def supervised(ledger: Path, job: str, *options: str, trainer: tuple[str, ...] = ()) -> list[str]:
    script = [sys.executable, str(TRAINER), str(ledger), "--job", job, "--every", "5", *trainer]
    return [*HOLDFAST, "run", *options, "--", *script]


def test_a_job_that_failed_waits_for_an_order_and_goes_where_it_is_told(tmp_path: Path, server: Client) -> None:
    ledger, log, mended = tmp_path / "ledger.txt", tmp_path / "run.log", tmp_path / "mended"
    job = "waits-for-an-order"
    fails = ("--epochs", "2", "--fail-at", "38", "--unless-there-is", str(mended))
    command = supervised(ledger, job, "--starts", "1", trainer=fails)
    with spawned(command, log, environment(tmp_path / "store", server.server)) as supervisor:
        eventually(lambda: f"waiting for a restore request for {job}" in log.read_text(), "the supervisor to wait")
        gave_up = "gave up after 1 start: killed by SIGKILL"
        eventually(
            lambda: (seen := known(server, job)) is not None and seen.status_reason == gave_up, "its failure"
        )
        output = [notice.message for notice in server.notices(job) if notice.code == "waits"]
        assert "The supervisor waits for a restore request" in output[0]
        assert "without a new iteration, the last one (killed by SIGKILL) at iteration 38" in output[0]
        steps = len(read_ledger(ledger))
        mended.touch()
        order = server.restore(job, _oldest(server, job))
        assert supervisor.wait(PATIENCE_SECONDS) == 0
    done = server.order(job, order.id)
    states = [step.state for step in done.transitions if step.state != "delivered"]  # a poll may be quicker
    assert states == ["requested", "restoring", "restored"]
    after = read_ledger(ledger)[steps:]
    assert [step.iteration for step in after] == list(range(order.iteration + 1, 55))
    assert f"restore of {order.checkpoint} requested: starting the trainer" in log.read_text()


def test_a_job_is_restarting_while_its_supervisor_restarts_it_and_fails_when_it_gives_up(
    tmp_path: Path, server: Client
) -> None:
    log, job, again = tmp_path / "run.log", "crash-loop", tmp_path / "again"
    script = tmp_path / "train.py"
    script.write_text(CRASH_LOOP)
    command = [*HOLDFAST, "run", "--starts", "2", "--", sys.executable, str(script), job, str(again)]

    def status() -> tuple[str, str, int]:
        seen = known(server, job)
        return ("", "", 0) if seen is None else (seen.status, seen.status_reason, seen.attempt)

    with spawned(command, log, environment(tmp_path / "store", server.server)) as supervisor:
        restarting = "restarting", "start 1 of 2, a GPU ran out of memory: CUDA out of memory, said the script", 1
        eventually(lambda: status() == restarting, "the first restart")
        again.touch()
        gave_up = "failed", "gave up after 2 starts: a GPU ran out of memory: CUDA out of memory, said the script"
        eventually(lambda: status()[:2] == gave_up, "the end")
        found = known(server, job)
        assert found is not None
        assert found.supervisor is not None
        assert (found.supervisor.waits, found.supervisor.failed) == (True, True)
        supervisor.send_signal(signal.SIGINT)
        assert supervisor.wait(PATIENCE_SECONDS) == 128 + signal.SIGINT
    found = known(server, job)
    assert found is not None
    assert found.supervisor is not None
    assert not found.supervisor.waits


def test_a_job_that_is_done_waits_where_that_is_wanted_and_ends_when_told_to(
    tmp_path: Path, server: Client
) -> None:
    ledger, log, job = tmp_path / "ledger.txt", tmp_path / "run.log", "stays"
    command = supervised(ledger, job, "--stay", "always", trainer=("--epochs", "1"))
    with spawned(command, log, environment(tmp_path / "store", server.server)) as supervisor:
        eventually(lambda: "waiting for a restore request" in log.read_text(), "the supervisor to wait")
        order = server.restore(job, _oldest(server, job))
        eventually(lambda: server.order(job, order.id).state == "restored", "the job to go back")
        eventually(
            lambda: log.read_text().count("waiting for a restore request") == 2, "the supervisor to wait again"
        )
        supervisor.terminate()
        assert supervisor.wait(PATIENCE_SECONDS) == 0
    assert server.notices(job)[0].code == "wait_ended"  # the pages no longer say that a supervisor waits
    assert [step.iteration for step in read_ledger(ledger)] == [*range(1, 28), *range(order.iteration + 1, 28)]


def test_a_script_that_cannot_be_taken_back_is_started_again_for_an_order_and_for_its_undoing(
    tmp_path: Path, server: Client
) -> None:
    ledger, log, job = tmp_path / "ledger.txt", tmp_path / "run.log", "relaunched"
    env = environment(tmp_path / "store", server.server) | {"HOLDFAST_RESTORABLE_IN_PLACE": "no"}
    command = supervised(ledger, job, trainer=("--epochs", "400", "--slowly"))
    with spawned(command, log, env) as supervisor:
        eventually(lambda: len(read_ledger(ledger)) > 25, "the job to train")
        eventually(
            lambda: (seen := known(server, job)) is not None and seen.restore_mode == "relaunch", "its mode"
        )
        at = _oldest(server, job)
        preview = server.preview_restore(job, f"{at:012d}-1")
        assert "at once, by a restart of the script through its supervisor" in preview.what
        assert preview.estimated_seconds is not None
        order = server.restore(job, at)
        eventually(lambda: server.order(job, order.id).state == "restored", "the job to go back")
        done = server.order(job, order.id)
        assert done.undoable
        left = int((done.safety_checkpoint or "")[:12])
        eventually(lambda: read_ledger(ledger)[-1].iteration > at + 5, "the job to train on")
        back = server.undo_restore(job, order.id)
        eventually(lambda: server.order(job, back.id).state == "restored", "the job to go where it was")
        eventually(lambda: read_ledger(ledger)[-1].iteration > left + 3, "the job to train on there")
        supervisor.terminate()
        supervisor.wait(PATIENCE_SECONDS)
    assert [step.state for step in done.transitions] == ["requested", "delivered", "restoring", "restored"]
    steps = read_ledger(ledger)
    starts = list(dict.fromkeys(step.pid for step in steps))
    assert len(starts) == 3
    first, second, third = ([step for step in steps if step.pid == pid] for pid in starts)
    assert (first[-1].iteration, second[0].iteration, third[0].iteration) == (left, at + 1, left + 1)
    outcomes = {step.iteration: step.outcome for step in first}
    assert all(step.outcome == outcomes[step.iteration] for step in second if step.iteration <= left)
    assert log.read_text().count("restarting the trainer to restore checkpoint") == 2
    orders = [each.order for each in open_store(tmp_path / "store").records(job, Lineage)]
    assert orders == [None, order.id, back.id]


@pytest.mark.parametrize("times", [1, pytest.param(50, marks=LONG)])
def test_an_old_life_that_wakes_up_changes_nothing(tmp_path: Path, server: Client, times: int) -> None:
    seed = int(os.environ.get("HOLDFAST_TEST_SEED", time.time_ns() % 2**32))
    print(f"repeat these moments with HOLDFAST_TEST_SEED={seed}")

    def wakes_up(number: int) -> None:
        _wakes_up(tmp_path / str(number), server, f"wakes-{times}-{number}", random.Random(seed + number))

    with ThreadPoolExecutor(AT_ONCE) as jobs:  # each of which waits for most of its time
        done = list(jobs.map(wakes_up, range(times)))
    print(f"wake-ups: {len(done)} of an old incarnation that was stopped, nothing of the new run changed in any")


def _wakes_up(folder: Path, server: Client, job: str, chance: random.Random) -> None:
    """Stopped anywhere in an iteration, a checkpoint or a restore, for as long as a new run lasts."""
    folder.mkdir()
    ledger, log, store, enough = folder / "old", folder / "old.log", folder / "store", folder / "enough"
    env = environment(store, server.server)

    def run(ledger: Path, enough: Path) -> list[str]:
        trainer = [sys.executable, str(HERE / "interruptible_trainer.py"), str(ledger), job, str(enough)]
        return [*HOLDFAST, "run", "--", *trainer]

    with spawned(run(ledger, folder / "never"), log, env) as old:
        eventually(
            lambda: (seen := known(server, job)) is not None and seen.checkpoints_total >= 2, "two checkpoints"
        )
        moment = chance.randrange(5), chance.uniform(0, 0.03)
        pids, passed = [old.pid, read(ledger)[0].pid], len(read(ledger)) + moment[0]
        if chance.random() < 0.5:
            os.kill(pids[1], signal.SIGSTOP)  # or retention may take the checkpoint meanwhile
            server.restore(job, next(row.iteration for row in server.checkpoints(job) if row.restorable))
            os.kill(pids[1], signal.SIGCONT)
        eventually(lambda: len(read(ledger)) >= passed, "some iterations")
        time.sleep(moment[1])  # where in one of them it falls is left to chance
        try:
            _stop(pids, store / job / ".lock")
            stopped_at = time.time()  # what it had said by then may come late, and is so
            with spawned(run(folder / "new", enough), folder / "new.log", env) as new:
                eventually(lambda: len(read(folder / "new")) > 20, "the new one to train")
                enough.touch()
                assert new.wait(PATIENCE_SECONDS) == 0
            begun = open_store(store).records(job, Attempt)[1].started_at
            eventually(
                lambda: time.time() > begun + OVERLAP_SECONDS + 2, "clocks that differ to make no difference"
            )
            before, seen = _contents(store / job), _seen(server, job, stopped_at)
            assert seen[:3] == ("finished", 2, read(folder / "new")[-1].iteration)
        finally:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):  # the supervisor has passed it on, and all is over
                    os.kill(pid, signal.SIGCONT)
        assert old.wait(PATIENCE_SECONDS) == EXIT_FENCED
    assert _contents(store / job) == before
    assert _seen(server, job, stopped_at) == seen
    assert "This one saves nothing from now on, and ends." in log.read_text()
    assert "this supervisor ends" in log.read_text()


def _stop(pids: list[int], lock: Path) -> None:
    """But not while one of them holds the lock of the store: for that a new run would wait."""
    while True:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        eventually(lambda: all(_is_stopped(pid) for pid in pids), "them to stop")
        with lock.open() as held:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.kill(pids[1], signal.SIGCONT)
            else:
                return


def _is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] == "T"


def _oldest(server: Client, job: str) -> int:
    oldest = server.oldest_restorable(job)
    assert oldest is not None
    return oldest.iteration


def _contents(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _seen(server: Client, job: str, since: float) -> tuple[object, ...]:
    found = known(server, job)
    assert found is not None
    notices = [notice.message for notice in server.notices(job) if notice.at > since]
    points = [(point.id, point.state) for point in server.checkpoints(job)]
    orders = [(order.id, order.state, order.new_lineage) for order in server.orders(job)]
    return found.status, found.attempt, found.iteration, found.lineage, found.loss, notices, points, orders
