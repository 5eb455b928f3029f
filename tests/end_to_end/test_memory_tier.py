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
from collections.abc import Collection
from pathlib import Path

import pytest

from holdfast.client import Client
from tests.support import SUPPORT
from tests.support.eventually import PATIENCE_SECONDS, eventually
from tests.support.job_processes import HOLDFAST, environment, read_ledger, spawned
from tests.support.memory_tier_outcome import MemoryTierOutcome, assert_nothing_left

pytestmark = pytest.mark.processes

TRAINER = SUPPORT / "memory_tier_trainer.py"
ITERATIONS, MOST_ITERATIONS = 30, 100


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
    command = [sys.executable, str(TRAINER), str(folder / "ledger.txt"), "--iterations", str(MOST_ITERATIONS)]
    subprocess.run([*command, "--every", "50"], env=environment(folder / "store"), check=True)
    return {step.iteration: step.loss for step in read_ledger(folder / "ledger.txt")}


def assert_exact(ended: MemoryTierOutcome, expected: dict[int, str], iterations: int = ITERATIONS) -> None:
    assert ended.status == 0
    for step in ended.steps:
        assert step.loss == expected[step.iteration], step
    assert sorted({step.iteration for step in ended.steps}) == list(range(1, iterations + 1))


ENDS = {
    "SIGKILL hang": True, "abort hang": True, "exception": True, "SIGKILL hang scribble": False,
}  # fmt: skip
"""Of one start after the other: whether the next one goes on from the checkpoint that is in memory."""
STAGES = {
    "unsealing": (-5, True), "unmarked": (-5, False), "copying": (-5, False), "copied": (-5, False),
    "half sealed": (-5, False), "sealed": (0, True), "committing": (0, True), "committed": (0, True),
}  # fmt: skip
"""Of a checkpoint: what the next start goes on from, after it or before, and whether it finds that in memory."""


def places(ends: Collection[str]) -> list[int]:
    """The iterations of the checkpoints at which the starts end."""
    return [15 + 10 * number for number in range(len(ends))]


def test_a_snapshot_that_never_became_durable_is_used_if_it_is_whole(
    tmp_path: Path, expected: dict[int, str]
) -> None:
    ended = run(tmp_path, "--iterations", "60", "--ends", *ENDS, HOLDFAST_KEEP="100")
    assert_exact(ended, expected, 60)
    in_memory = [at for at, whole in zip(places(ENDS), ENDS.values(), strict=True) if whole]
    assert ended.from_memory == in_memory == [15, 25, 35]
    assert ended.resumed_at == [*in_memory, 40], "the last one was changed by a bug of native code"
    assert "does not match its digest" in ended.log
    assert {15, 25, 35} <= ended.attempts.keys(), "the rescue saves it under one attempt, or the next does"
    assert ended.attempts[45] == 5, "that of the last start, trained again"


def test_what_was_in_memory_is_saved_when_there_is_no_next_start_and_the_timeline_says_so(
    tmp_path: Path, server: Client
) -> None:
    options = ("--starts", "1", "--stay", "never")
    ended = run(tmp_path, "--ends", "SIGKILL hang", "--always", options=options, server=server.server)
    assert ended.status == 128 + signal.SIGKILL
    assert ended.rescued[-1:] == [15] or ended.from_memory == [15]
    assert ended.attempts.keys() == {5, 10, 15}
    (rescued,) = [notice for notice in server.notices("tier") if notice.code == "rescue"]
    assert "saved iteration 15 from memory after the trainer ended (killed by SIGKILL)" in rescued.message
    assert "5 iterations that were in no checkpoint" in rescued.message
    durable = [row for row in server.checkpoints("tier") if row.state == "durable"]
    assert 15 in {row.iteration for row in durable}


def test_a_kill_at_any_stage_leaves_a_whole_snapshot_or_none(tmp_path: Path, expected: dict[int, str]) -> None:
    ended = run(tmp_path, "--iterations", str(MOST_ITERATIONS), "--ends", *STAGES, HOLDFAST_KEEP="100")
    assert_exact(ended, expected, MOST_ITERATIONS)
    resumed_at = [at + later for at, (later, _) in zip(places(STAGES), STAGES.values(), strict=True)]
    in_memory = [where for where, (_, is_in) in zip(resumed_at, STAGES.values(), strict=True) if is_in]
    assert dict(zip(STAGES, ended.resumed_at, strict=True)) == dict(zip(STAGES, resumed_at, strict=True))
    assert ended.from_memory == in_memory
    assert ended.attempts.keys() == set(range(5, MOST_ITERATIONS + 1, 5))


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
    ended = run(tmp_path, "--ends", "exception", options=("--no-memory-tier",))
    assert_exact(ended, expected)
    assert (ended.resumed_at, ended.from_memory) == ([15], [])
