"""A trainer killed at random moments ends up exactly where an undisturbed one does."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from holdfast.client import Client
from tests.support.eventually import PATIENCE_SECONDS, eventually
from tests.support.job_processes import (
    HOLDFAST,
    SAMPLES,
    TRAINER,
    LedgerStep,
    environment,
    known,
    read_ledger,
    spawned,
)

pytestmark = pytest.mark.processes

BATCHES = 27
EVERY = 5


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("kills", "epochs"), [(2, 4), pytest.param(20, 40, marks=pytest.mark.long)])
def test_kills_change_no_loss_and_no_sample(tmp_path: Path, server: Client, kills: int, epochs: int) -> None:
    seed = int(os.environ.get("HOLDFAST_TEST_SEED", time.time_ns() % 2**32))
    print(f"repeat these kills with HOLDFAST_TEST_SEED={seed}")
    arguments = ["--epochs", str(epochs), "--every", str(EVERY)]
    expected = _undisturbed(tmp_path, arguments)

    ledger, log, all_killed = tmp_path / "killed.txt", tmp_path / "run.log", tmp_path / "all killed"
    job = f"killed-{kills}"
    trainer = [sys.executable, str(TRAINER), str(ledger), *arguments, "--job", job]
    run = [*HOLDFAST, "run", "--starts", "100", "--", *trainer, "--until-there-is", str(all_killed)]
    with spawned(run, log, environment(tmp_path / "store", server.server)) as supervisor:
        _kill_at_random(kills, random.Random(seed), ledger, log, last=epochs * BATCHES)
        all_killed.touch()
        assert supervisor.wait(PATIENCE_SECONDS) == 0

    steps = read_ledger(ledger)
    assert len({step.pid for step in steps}) >= kills / 2, "most starts should have lived to take a step"
    for step in steps:
        assert step.outcome == expected[step.iteration], f"{step} differs; starts:\n{log.read_text()[-9000:]}"
    final = {step.iteration: step for step in steps}
    assert sorted(final) == list(range(1, epochs * BATCHES + 1))
    _assert_each_sample_once_an_epoch(list(final.values()), epochs)
    _assert_told(server, job, expected, kills)


@pytest.mark.skipif(sys.platform != "linux", reason="warm starts need Linux")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("kills", "epochs"), [(3, 4), pytest.param(200, 100, marks=pytest.mark.long)])
def test_kills_of_warm_starts_lose_nothing_and_leave_nothing(tmp_path: Path, kills: int, epochs: int) -> None:
    seed = int(os.environ.get("HOLDFAST_TEST_SEED", time.time_ns() % 2**32))
    print(f"repeat these kills with HOLDFAST_TEST_SEED={seed}")
    arguments = ["--epochs", str(epochs), "--every", str(EVERY)]
    expected = _undisturbed(tmp_path, arguments)

    ledger, log, all_killed = tmp_path / "killed.txt", tmp_path / "run.log", tmp_path / "all killed"
    trainer = [sys.executable, str(TRAINER), str(ledger), *arguments, "--until-there-is", str(all_killed)]
    run = [*HOLDFAST, "run", "--starts", "100", "--", *trainer]
    with spawned(run, log, environment(tmp_path / "store")) as supervisor:
        first = _wait_for_start(1, log)
        _wait_for_steps(EVERY, first, ledger, last=epochs * BATCHES)
        os.kill(first, signal.SIGSTOP)  # most iterations are for warm starts
        eventually(lambda: "the next start is warm" in log.read_text(), "the imports")
        os.kill(first, signal.SIGKILL)
        at_first = _descriptors(supervisor.pid, trainer=_wait_for_start(2, log))
        _kill_at_random(kills, random.Random(seed), ledger, log, last=epochs * BATCHES, first=2)
        last = _wait_for_start(kills + 1, log)
        # helpers of a start end after it, and an import has files open for a moment
        eventually(lambda: len(psutil.Process(supervisor.pid).children()) == 3, "trainer, imports and relay alone")
        eventually(lambda: _descriptors(supervisor.pid, last) <= at_first, f"{at_first} descriptors")
        all_killed.touch()
        assert supervisor.wait(PATIENCE_SECONDS) == 0

    assert log.read_text().count(", warm, ") == kills
    assert _processes_with(tmp_path) == []
    steps = read_ledger(ledger)
    assert len({step.pid for step in steps}) >= kills / 2, "most starts should have lived to take a step"
    for step in steps:
        assert step.outcome == expected[step.iteration], f"{step} differs; starts:\n{log.read_text()[-9000:]}"
    final = {step.iteration: step for step in steps}
    assert sorted(final) == list(range(1, epochs * BATCHES + 1))
    _assert_each_sample_once_an_epoch(list(final.values()), epochs)


def _descriptors(supervisor: int, trainer: int) -> int:
    """The open descriptors of a supervisor and of its process with the imports."""
    children = {each.pid: each.cmdline() for each in psutil.Process(supervisor).children()}
    forked = [pid for pid, words in children.items() if any(word.endswith("warm_template.py") for word in words)]
    (imports,) = set(forked) - {trainer}
    return sum(psutil.Process(pid).num_fds() for pid in (supervisor, imports))


def _processes_with(folder: Path) -> list[list[str]]:
    """The command lines of processes that this run of a job has left."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if str(folder) in process.environ().get("HOLDFAST_STORE", ""):
                found.append(process.cmdline())
    return found


def _undisturbed(folder: Path, arguments: list[str]) -> dict[int, tuple[str, tuple[int, ...]]]:
    ledger = folder / "undisturbed.txt"
    command = [sys.executable, str(TRAINER), str(ledger), *arguments]
    subprocess.run(command, env=environment(folder / "undisturbed"), check=True)
    return {step.iteration: step.outcome for step in read_ledger(ledger)}


def _kill_at_random(
    kills: int, moments: random.Random, ledger: Path, log: Path, last: int, first: int = 1
) -> None:
    """Kill each start a random number of steps after it began, some before their first step."""
    for start in range(first, kills + 1):
        pid = _wait_for_start(start, log)
        steps = moments.choice([0, 1, 2, *range(3, 25)])
        _wait_for_steps(steps, pid, ledger, last)
        # where in a step, or in a start, it happens is the part left to chance
        time.sleep(moments.uniform(0, 0.02 if steps else 1.5))
        os.kill(pid, signal.SIGKILL)


def _wait_for_start(start: int, log: Path) -> int:
    eventually(lambda: _pid(log, start) is not None, f"start {start}")
    pid = _pid(log, start)
    assert pid is not None
    return pid


def _wait_for_steps(steps: int, pid: int, ledger: Path, last: int) -> None:
    def taken() -> bool:
        ledgered = read_ledger(ledger)
        return sum(step.pid == pid for step in ledgered) >= steps or any(
            step.iteration == last for step in ledgered
        )

    eventually(taken, f"step {steps} of process {pid}")


def _pid(log: Path, start: int) -> int | None:
    for line in log.read_text().splitlines():
        if f"start {start}: process " in line:
            return int(line.split("process ")[1].split(",")[0])
    return None


def _assert_each_sample_once_an_epoch(steps: list[LedgerStep], epochs: int) -> None:
    for epoch in range(epochs):
        of_epoch = range(epoch * BATCHES + 1, (epoch + 1) * BATCHES + 1)
        seen = Counter(index for step in steps if step.iteration in of_epoch for index in step.samples)
        assert seen == Counter(range(SAMPLES)), f"epoch {epoch}: a sample is missing or came twice"


def _assert_told(server: Client, name: str, expected: dict[int, tuple[str, tuple[int, ...]]], kills: int) -> None:
    """The server has seen the end, and counts every start."""
    job = known(server, name)
    assert job is not None
    assert (job.status, job.iteration) == ("finished", len(expected))
    assert job.attempt >= kills / 2
