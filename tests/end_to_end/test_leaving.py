"""SIGTERM, as a scheduler sends it: training ends at a boundary, saved, and goes on from there."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import leaving_ranks
import pytest
from crowd import Crowd
from crowd import crowd as crowd
from stage import HOLDFAST, PATIENCE_SECONDS, TRAINER, environment, known, read_ledger, spawned, until

from holdfast import restore
from holdfast.client import Client
from holdfast.leaving import EXIT_ASKED, FACTOR, SPARE_SECONDS, Leaving
from holdfast.store import open_store

pytestmark = pytest.mark.processes


def trainer(ledger: Path, job: str, *options: str) -> list[str]:
    return [sys.executable, str(TRAINER), str(ledger), "--job", job, *options]


def newest(store: Path, job: str) -> int:
    return int(open_store(store).checkpoints(job)[-1].partition("-")[0])


@pytest.mark.parametrize("run", [[], [*HOLDFAST, "run", "--"]])
def test_a_trainer_that_is_told_to_end_saves_and_ends(tmp_path: Path, server: Client, run: list[str]) -> None:
    ledger, job = tmp_path / "ledger.txt", f"told-to-end-{len(run)}"
    command = [*run, *trainer(ledger, job, "--slowly", "--every", "100000")]
    with spawned(command, tmp_path / "log", environment(tmp_path / "store", server.server)) as process:
        until(lambda: len(read_ledger(ledger)) > 10, "training")
        process.terminate()
        assert process.wait(PATIENCE_SECONDS) == EXIT_ASKED
    last = read_ledger(ledger)[-1].iteration
    assert newest(tmp_path / "store", job) == last
    found = known(server, job)
    assert found is not None
    assert (found.status, found.iteration) == ("stopped", last)
    told = [notice.message for notice in server.notices(job) if notice.code == "preempted"]
    assert told == [f"told to end by SIGTERM after iteration {last}: saved as {last:012d}-1"]


@pytest.mark.parametrize("told", [0, 2])
def test_all_ranks_end_at_one_boundary_whichever_is_told(crowd: Crowd, tmp_path: Path, told: int) -> None:
    done = crowd.run(3, "leaving_ranks.train", store=str(tmp_path), told=told)
    assert [each["exit"] for each in done] == [EXIT_ASKED] * 3
    (last,) = {each["iteration"] for each in done}
    assert last > leaving_ranks.TOLD_AT
    store = open_store(tmp_path)
    checkpoints = store.checkpoints("leaving")
    assert newest(tmp_path, "leaving") == last
    assert restore.verify(store, "leaving", checkpoints[-1]).world_size == 3


@pytest.mark.parametrize(("times", "grace"), [(2, 30.0), pytest.param(100, 5.0, marks=pytest.mark.long)])
@pytest.mark.timeout(3600)
def test_sigterm_at_any_moment_ends_in_time_and_loses_nothing(tmp_path: Path, times: int, grace: float) -> None:
    seed = int(os.environ.get("HOLDFAST_TEST_SEED", time.time_ns() % 2**32))
    print(f"repeat these moments with HOLDFAST_TEST_SEED={seed}")
    moments, ledger, store = random.Random(seed), tmp_path / "ledger.txt", tmp_path / "store"
    env = environment(store) | {"HOLDFAST_GRACE": f"{grace:g}"}
    command = trainer(ledger, "any-moment", "--epochs", "4000", "--every", "7")
    reached = 0
    for _ in range(times):
        seen = len(read_ledger(ledger))
        with spawned(command, tmp_path / "log", env) as process:
            steps = moments.choice([1, 2, 5, 20])
            until(lambda at=seen + steps: len(read_ledger(ledger)) >= at, "training")
            time.sleep(moments.uniform(0, 0.02))  # where in an iteration it falls is left to chance
            asked_at = time.monotonic()
            process.terminate()
            assert process.wait(PATIENCE_SECONDS) == EXIT_ASKED
            assert time.monotonic() - asked_at < grace
        steps_here = read_ledger(ledger)[seen:]
        assert steps_here[0].iteration == reached + 1, "nothing is trained twice, nothing left out"
        reached = steps_here[-1].iteration
        assert newest(store, "any-moment") == reached
    opened = open_store(store)
    for checkpoint in opened.checkpoints("any-moment"):
        restore.verify(opened, "any-moment", checkpoint)


ENDS = """
import signal, sys, time
{before}
import holdfast
from holdfast.leaving import Leaving
leaving = Leaving({grace})
print("ready", flush=True)
while True: time.sleep(0.01)
"""


def ended(grace: float, before: str = "", *, signals: int = 1) -> tuple[int, float]:
    """How a process that never comes to a boundary ends, and after how long."""
    program = ENDS.format(before=before, grace=grace)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        began = time.monotonic()
        for _ in range(signals):
            process.terminate()
            time.sleep(0.2 if signals > 1 else 0)  # two that are pending at the same time are one
        return process.wait(PATIENCE_SECONDS), time.monotonic() - began


def test_what_comes_to_no_boundary_ends_with_its_grace() -> None:
    status, seconds = ended(1.0)
    assert status == EXIT_ASKED
    assert seconds < 1.0


def test_a_second_signal_ends_at_once() -> None:
    status, seconds = ended(60.0, signals=2)
    assert status == -signal.SIGTERM
    assert seconds < 30


@pytest.mark.parametrize(
    ("grace", "before", "expected"),
    [(0.0, "", -signal.SIGTERM), (60.0, "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))", 7)],
)
def test_a_signal_that_is_not_ours_is_left_alone(grace: float, before: str, expected: int) -> None:
    assert ended(grace, before)[0] == expected


def test_a_checkpoint_is_taken_where_it_fits() -> None:
    now = [100.0]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "a session was left open by another test"
    leaving = Leaving(10.0, clock=lambda: now[0])
    try:
        assert not leaving.asked
        signal.raise_signal(signal.SIGTERM)  # to this thread, and heard before it returns
        assert leaving.asked
        assert leaving.left_seconds == 10.0 - SPARE_SECONDS
        now[0] += 3.0
        fitting = (10.0 - 3.0 - SPARE_SECONDS) / FACTOR
        assert (leaving.fits(fitting), leaving.fits(fitting * 1.01), leaving.fits(None)) == (True, False, True)
    finally:
        leaving.close()
        leaving.cancel()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


EXAMPLE = Path(__file__).parents[2] / "examples" / "slurm.sh"
SLURM = {
    "srun": 'exec "$@"',
    "scontrol": 'echo "$@" >> "$ASKED"',
}
"""What the example asks of Slurm, on this machine: to start the job, and to queue it again."""


@pytest.mark.parametrize(("number", "asked"), [(signal.SIGUSR1, ["requeue 17"]), (signal.SIGTERM, [])])
def test_the_example_for_slurm_saves_before_its_time_is_over_and_queues_itself_again(
    tmp_path: Path, number: signal.Signals, asked: list[str]
) -> None:
    programs, ledger, requeued = tmp_path / "bin", tmp_path / "ledger.txt", tmp_path / "asked"
    programs.mkdir()
    for name, body in (SLURM | {"holdfast": f'exec {" ".join(HOLDFAST)} "$@"'}).items():
        (programs / name).write_text(f"#!/bin/sh\n{body}\n")
        (programs / name).chmod(0o755)
    env = environment(tmp_path / "store") | {
        "PATH": f"{programs}:{os.environ['PATH']}", "SLURM_JOB_ID": "17", "ASKED": str(requeued),
    }  # fmt: skip
    command = ["bash", str(EXAMPLE), *trainer(ledger, "slurm", "--slowly", "--every", "100000")]
    with spawned(command, tmp_path / "log", env) as script:
        until(lambda: len(read_ledger(ledger)) > 10, "training")
        script.send_signal(number)
        assert script.wait(PATIENCE_SECONDS) == EXIT_ASKED
    assert newest(tmp_path / "store", "slurm") == read_ledger(ledger)[-1].iteration
    assert (requeued.read_text().splitlines() if requeued.exists() else []) == asked


def test_the_example_for_kubernetes_gives_the_time_that_it_tells_of() -> None:
    """No cluster is here: what can be wrong without one is that its two times do not fit."""
    text = (EXAMPLE.parent / "kubernetes.yaml").read_text()
    (period,) = re.findall(r"terminationGracePeriodSeconds: (\d+)", text)
    (grace,) = re.findall(r'"--grace", "(\d+)"', text)
    assert 0 < int(grace) < int(period)
