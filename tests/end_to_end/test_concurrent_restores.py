"""Two people click at the same moment, each of them twice: one of them wins, and the job goes back once."""

from __future__ import annotations

import os
import signal
import sys
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from holdfast.client import Client, Conflict, Order
from holdfast.store import Lineage, open_store
from tests.support.eventually import eventually
from tests.support.job_processes import HOLDFAST, environment, known, spawned
from tests.support.restore_faults import HERE, read, undisturbed
from tests.support.trial_pool import LONG

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("rounds", [5, pytest.param(100, marks=LONG)])
def test_of_two_double_clicks_one_wins_and_the_job_goes_back_once(
    server: Client, tmp_path: Path, rounds: int
) -> None:
    job, ledger, enough = f"clicked-{rounds}", tmp_path / "ledger", tmp_path / "enough"
    trainer = [sys.executable, str(HERE / "interruptible_trainer.py"), str(ledger), job, str(enough)]
    # nothing is retired: what the server knows to be there is there when the job comes to it
    env = environment(tmp_path / "store", server.server) | {"HOLDFAST_KEEP": "100000"}
    placed, refused = [], 0
    with spawned([*HOLDFAST, "run", "--", *trainer], tmp_path / "log", env) as run:
        eventually(
            lambda: (seen := known(server, job)) is not None and seen.checkpoints_total >= 2, "two checkpoints"
        )
        pid = read(ledger)[0].pid
        for number in range(rounds):
            os.kill(pid, signal.SIGSTOP)  # so that none of the four clicks comes after the job has gone back
            try:
                newest, before = [row.id for row in server.checkpoints(job, limit=500) if row.restorable][:2]
                answers = clicked(server.server, job, [newest, before if number % 2 else newest])
            finally:
                os.kill(pid, signal.SIGCONT)
            (won,) = {answer.id for answer in answers if isinstance(answer, Order)}
            lost = [answer for answer in answers if isinstance(answer, Conflict)]
            assert len(lost) == (2 if number % 2 else 0), answers
            for each in lost:
                told = each.body["order"]
                assert (told["id"], told["who"]) == (won, "operator")
                assert told["created_at"] > 0
            placed.append(won)
            refused += len(lost)
            eventually(lambda order=won: not server.order(job, order).open, "the job to go back")
            done = server.order(job, won)
            assert done.state == "restored", done
        enough.touch()
        assert run.wait() == 0
    begun = [lineage.order for lineage in open_store(tmp_path / "store").records(job, Lineage)]
    print(
        f"double clicks: {rounds} times 2 x 2, {len(set(placed))} orders, {refused} clicks refused with who and "
        f"when, {len(begun) - 1} restores"
    )
    assert begun == [None, *placed]
    assert sorted(order.id for order in server.orders(job, limit=200)) == sorted(placed)
    lines = read(ledger)
    assert len({line.pid for line in lines}) == 1
    expected = undisturbed(tmp_path, max(line.iteration for line in lines))
    assert [line for line in lines if line.outcome != expected[line.iteration]] == []


def clicked(server: str, job: str, targets: list[str]) -> list[Order | Conflict]:
    """What each person's two clicks, all four at the same moment, have come to."""
    together = threading.Barrier(2 * len(targets))

    def click(target: str, key: str) -> Order | Conflict:
        with Client(server) as client:
            together.wait()
            try:
                return client.restore(job, checkpoint=target, key=key)
            except Conflict as conflict:
                return conflict

    with ThreadPoolExecutor(together.parties) as people:
        clicks = [partial(click, target, uuid.uuid4().hex) for target in targets]
        return [each.result() for each in [people.submit(one) for one in clicks for _ in range(2)]]
