"""Data that is left out while the job is killed at random: its losses are those of an order without that data."""

from __future__ import annotations

import math
import os
import random
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from holdfast.client import Client
from holdfast.protocol.wire import DataSkip, LeftOutData
from holdfast.store import Lineage, open_store
from tests.support.end_to_end_fixtures import server as server
from tests.support.eventually import PATIENCE_SECONDS, eventually
from tests.support.job_processes import HOLDFAST, environment, known, spawned
from tests.support.left_out_trainer import BAD_SAMPLE, BATCH_SIZE, SAMPLES

pytestmark = pytest.mark.processes

TRAINER = Path(__file__).resolve().parents[2] / "support/left_out_trainer.py"
BATCHES = SAMPLES // BATCH_SIZE


class Update(NamedTuple):
    pid: int
    lineage: int
    iteration: int
    loss: float


def read(ledger: Path) -> list[Update]:
    if not ledger.exists():
        return []
    lines = [line.split() for line in ledger.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [
        Update(int(pid), int(lineage), int(iteration), struct.unpack("<d", bytes.fromhex(loss))[0])
        for pid, lineage, iteration, loss in lines
    ]


def numbers_of(left_out: Sequence[LeftOutData]) -> list[int]:
    """Return the numbers of the batches in the order of the data that were left out, one after the other."""
    numbers: list[int] = []
    for each in left_out:
        begin = each.iteration + len(numbers)
        numbers += range(begin, begin + each.batches)
    return numbers


def losses_without(folder: Path, left_out: Sequence[int], *arguments: str) -> list[float]:
    """Return the losses of a plain loop over the order without these batches."""
    ledger = folder / "reference.txt"
    command = [sys.executable, str(TRAINER), str(ledger), *arguments, "--without", ",".join(map(str, left_out))]
    subprocess.run(command, env=environment(folder / "unused"), check=True)
    return [update.loss for update in read(ledger)]


def assert_exact(folder: Path, ledger: Path, left_out: Sequence[LeftOutData], *arguments: str) -> None:
    final = {update.iteration: update.loss for update in read(ledger)}
    expected = losses_without(folder, numbers_of(left_out), *arguments)
    assert [final[iteration] for iteration in range(1, len(expected) + 1)] == expected
    assert all(map(math.isfinite, expected))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("kills", "epochs"), [(3, 4), pytest.param(20, 24, marks=pytest.mark.long)])
def test_kills_while_the_rule_restores_change_no_loss(
    tmp_path: Path, workers: int, kills: int, epochs: int
) -> None:
    seed = int(os.environ.get("HOLDFAST_TEST_SEED", time.time_ns() % 2**32))
    print(f"repeat these kills with HOLDFAST_TEST_SEED={seed}")
    moments, store = random.Random(seed), tmp_path / "store"
    ledger, log = tmp_path / "ledger.txt", tmp_path / "run.log"
    same = ["--epochs", str(epochs), "--workers", str(workers), "--bad", str(BAD_SAMPLE)]
    run = [*HOLDFAST, "run", "--starts", "100", "--", sys.executable, str(TRAINER), str(ledger), *same]
    with spawned([*run, "--seconds", "0.02"], log, environment(store)) as supervisor:
        last = 0
        for _ in range(kills):
            updates = moments.randrange(3, max(4, epochs * BATCHES // (kills + 1)))

            def has_trained(count: int = updates, before: int = last) -> bool:
                found = read(ledger)
                own = [update for update in found if update.pid == found[-1].pid]
                return supervisor.poll() is not None or (found[-1].pid != before and len(own) >= count)

            eventually(lambda: bool(read(ledger)), "the first update")
            eventually(has_trained, f"{updates} updates of the next start")
            if supervisor.poll() is not None:
                break
            last = read(ledger)[-1].pid
            time.sleep(moments.uniform(0, 0.05))  # where in an iteration or a restore it happens is left to chance
            os.kill(last, signal.SIGKILL)
        assert supervisor.wait(PATIENCE_SECONDS) == 0
    left_out = open_store(store).records("left-out", Lineage)[-1].left_out
    print(f"left out: {left_out}; killed {len({update.pid for update in read(ledger)}) - 1} times")
    assert left_out
    assert_exact(tmp_path, ledger, left_out, *same)


@pytest.mark.timeout(600)
def test_a_script_that_is_restarted_for_a_restore_leaves_the_data_out(tmp_path: Path, server: Client) -> None:
    ledger, log, store = tmp_path / "ledger.txt", tmp_path / "run.log", tmp_path / "store"
    job, go = "left-out-restart", tmp_path / "go"
    run = [*HOLDFAST, "run", "--", sys.executable, str(TRAINER), str(ledger), "--job", job, "--restart"]
    with spawned(
        [*run, "--wait-at", "20", "--until-there-is", str(go)], log, environment(store, server.server)
    ) as supervisor:

        def is_durable() -> bool:
            found = known(server, job)
            return found is not None and found.restore_mode == "relaunch" and bool(found.checkpoints_total)

        eventually(is_durable, "a checkpoint, and how it restores")
        order = server.restore(job, server.restorable(job, 10)[-1].iteration, skip=DataSkip(batches=7))
        go.touch()
        assert supervisor.wait(PATIENCE_SECONDS) == 0
    assert server.orders(job)[0].state == "restored"
    assert len({update.pid for update in read(ledger)}) == 2
    left_out = open_store(store).records(job, Lineage)[-1].left_out
    assert [(each.iteration, each.batches) for each in left_out] == [(order.iteration, 7)]
    assert_exact(tmp_path, ledger, left_out)
