"""The memory tier with real processes: whatever a trainer dies of, nothing that was whole in memory is lost."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from holdfast.client import Client
from tests.support import SUPPORT
from tests.support.eventually import PATIENCE_SECONDS, eventually
from tests.support.job_processes import HOLDFAST, environment, read_ledger, spawned
from tests.support.memory_tier_outcome import MemoryTierOutcome, assert_nothing_left

pytestmark = pytest.mark.processes

TRAINER = SUPPORT / "memory_tier_trainer.py"
ITERATIONS = 30


def run(
    folder: Path, *arguments: str, options: tuple[str, ...] = (), server: str = "", **extra: str
) -> MemoryTierOutcome:
    """Under a supervisor, to the end."""
    folder.mkdir(exist_ok=True)
    ledger, log, store = folder / "ledger.txt", folder / "run.log", folder / "store"
    command = [*HOLDFAST, "run", *options, "--", sys.executable, str(TRAINER), str(ledger), *arguments]
    env = environment(store, server) | {"TMPDIR": str(folder)} | extra
    with spawned(command, log, env) as supervisor:
        status = supervisor.wait(PATIENCE_SECONDS)
        print(log.read_text())
        assert_nothing_left(supervisor.pid)
    assert not list(folder.glob("holdfast-run-*"))
    return MemoryTierOutcome(status, log.read_text(), read_ledger(ledger), store)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The loss of each iteration, of a run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    command = [sys.executable, str(TRAINER), str(folder / "ledger.txt")]
    subprocess.run(command, env=environment(folder / "store"), check=True)
    return {step.iteration: step.loss for step in read_ledger(folder / "ledger.txt")}


def assert_exact(ended: MemoryTierOutcome, expected: dict[int, str]) -> None:
    assert ended.status == 0
    for step in ended.steps:
        assert step.loss == expected[step.iteration], step
    assert sorted({step.iteration for step in ended.steps}) == list(range(1, ITERATIONS + 1))


@pytest.mark.parametrize("end", ["SIGKILL", "abort"])
def test_a_snapshot_that_never_became_durable_is_not_lost(
    tmp_path: Path, expected: dict[int, str], end: str
) -> None:
    ended = run(tmp_path, "--end", end, "--hang")
    assert_exact(ended, expected)
    assert (ended.resumed_at, ended.from_memory) == ([15], [15])
    assert 15 in ended.attempts, "the rescue saves it under the first attempt, or the second does under its own"


def test_after_an_exception_the_next_start_reads_no_store(tmp_path: Path, expected: dict[int, str]) -> None:
    ended = run(tmp_path, "--end", "exception")
    assert_exact(ended, expected)
    assert (ended.resumed_at, ended.from_memory) == ([15], [15])


def test_what_was_in_memory_is_saved_when_there_is_no_next_start(tmp_path: Path) -> None:
    ended = run(tmp_path, "--end", "SIGKILL", "--hang", "--always", options=("--starts", "1", "--stay", "never"))
    assert ended.status == 128 + signal.SIGKILL
    assert ended.rescued[-1:] == [15] or ended.from_memory == [15]
    assert ended.attempts.keys() == {5, 10, 15}


def test_the_timeline_says_where_the_checkpoint_came_from(tmp_path: Path, server: Client) -> None:
    options = ("--starts", "1", "--stay", "never")
    run(tmp_path, "--end", "SIGKILL", "--hang", "--always", options=options, server=server.server)
    (rescued,) = [notice for notice in server.notices("tier") if notice.code == "rescue"]
    assert "saved iteration 15 from memory after the trainer ended (killed by SIGKILL)" in rescued.message
    assert "5 iterations that were in no checkpoint" in rescued.message
    durable = [row for row in server.checkpoints("tier") if row.state == "durable"]
    assert 15 in {row.iteration for row in durable}


def test_a_snapshot_that_was_scribbled_on_is_not_trusted(tmp_path: Path, expected: dict[int, str]) -> None:
    ended = run(tmp_path, "--end", "SIGKILL", "--hang", "--scribble")
    assert_exact(ended, expected)
    assert (ended.resumed_at, ended.from_memory) == ([10], [])
    assert "does not match its digest" in ended.log
    assert ended.attempts[15] == 2, "that of the second start, trained again"


STAGES = {
    "unsealing": (10, True), "unmarked": (10, False), "copying": (10, False), "copied": (10, False),
    "half sealed": (10, False), "sealed": (15, True), "committing": (15, True), "committed": (15, True),
}  # fmt: skip
"""Of the checkpoint at 15: what the next start goes on from, and whether it finds that in memory."""


@pytest.mark.parametrize("stage", STAGES)
def test_a_kill_at_any_stage_leaves_a_whole_snapshot_or_none(
    tmp_path: Path, expected: dict[int, str], stage: str
) -> None:
    ended = run(tmp_path, "--stage", stage)
    assert_exact(ended, expected)
    resumed_at, in_memory = STAGES[stage]
    assert ended.resumed_at == [resumed_at]
    assert ended.from_memory == ([resumed_at] if in_memory else [])
    assert ended.attempts.keys() == set(range(5, ITERATIONS + 1, 5))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kills", [3, pytest.param(25, marks=pytest.mark.long)])
def test_kills_at_random_change_no_loss(tmp_path: Path, expected: dict[int, str], kills: int) -> None:
    seed = int(os.environ.get("HOLDFAST_TEST_SEED", time.time_ns() % 2**32))
    print(f"repeat these kills with HOLDFAST_TEST_SEED={seed}")
    moments = random.Random(seed)
    ledger, log = tmp_path / "ledger.txt", tmp_path / "run.log"
    command = [
        *HOLDFAST,
        "run",
        "--starts",
        "1000",
        "--",
        sys.executable,
        str(TRAINER),
        str(ledger),
        "--every",
        "1",
    ]
    with spawned(command, log, environment(tmp_path / "store")) as supervisor:
        for start in range(1, kills + 1):
            eventually(lambda start=start: _trains(ledger, log, start) or supervisor.poll() is not None, "a step")
            time.sleep(moments.uniform(0, 0.02))
            with contextlib.suppress(ProcessLookupError, IndexError):  # it was done sooner
                os.kill(_trainers(log)[start - 1], signal.SIGKILL)
        status = supervisor.wait(PATIENCE_SECONDS)
    assert_exact(MemoryTierOutcome(status, log.read_text(), read_ledger(ledger), tmp_path / "store"), expected)


def _trainers(log: Path) -> list[int]:
    return [int(pid) for pid in re.findall(r"start \d+: process (\d+),", log.read_text())]


def _trains(ledger: Path, log: Path, start: int) -> bool:
    pids = _trainers(log)
    return len(pids) >= start and any(step.pid == pids[start - 1] for step in read_ledger(ledger))


def test_without_the_tier_the_store_is_read(tmp_path: Path, expected: dict[int, str]) -> None:
    ended = run(tmp_path, "--end", "exception", options=("--no-memory-tier",))
    assert_exact(ended, expected)
    assert (ended.resumed_at, ended.from_memory) == ([15], [])
