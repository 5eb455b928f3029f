"""A job that is killed, failed and restarted with other options, again and again, trains as if undisturbed."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.support.fork_server import ForkedProcess, ForkServer
from tests.support.store_invariants import leftovers, violations
from tests.support.system_call_tracing import MUTATING, traced
from tests.support.trial_pool import AT_ONCE, TrialPool

pytestmark = [pytest.mark.crash, pytest.mark.usefixtures("strace")]

LIVES = 10
"""The most that a job has. The last one is left in peace."""
WHOLE = 36
"""Iterations of the whole job."""
DONE = f"done {WHOLE}"
ORPHAN_SECONDS = 120.0
ERRORS = ("EIO", "ENOSPC", "EDQUOT")


@pytest.mark.timeout(0)
@pytest.mark.parametrize(
    "seconds", [4, pytest.param(int(os.environ.get("HOLDFAST_CRASH_SECONDS", "600")), marks=pytest.mark.long)]
)
def test_whatever_happens_to_it_a_job_ends_with_the_losses_of_an_undisturbed_one(
    trainers: TrialPool, tmp_path: Path, seconds: int
) -> None:
    seed = int(os.environ.get("HOLDFAST_TEST_SEED", time.time_ns() % 2**32))
    print(f"the first of these jobs is HOLDFAST_TEST_SEED={seed}")
    undisturbed = live(trainers.one(), tmp_path / "undisturbed", random.Random(0), peaceful=True)
    losses = {line for line in undisturbed.told if line.startswith("loss ")}
    deadline, seeds = time.monotonic() + seconds, iter(range(seed, seed + 10**9))

    def jobs(fork_server: ForkServer, _: int) -> list[str]:
        found: list[str] = []
        while not found and time.monotonic() < deadline:
            number = next(seeds)
            folder = tmp_path / str(number)
            found = [f"HOLDFAST_TEST_SEED={number}: {each}" for each in job(fork_server, folder, number, losses)]
            if not found:
                shutil.rmtree(folder)
        return found

    found = trainers.each(jobs, range(AT_ONCE))
    print(f"{next(seeds) - seed} jobs of up to {LIVES} lives")
    assert not found, "\n".join(found)


def job(fork_server: ForkServer, folder: Path, seed: int, losses: set[str]) -> list[str]:
    """What is wrong with a job, which lives until it has trained to its end and then once more in peace."""
    chance, told = random.Random(seed), []
    for number in range(LIVES):
        last = number == LIVES - 1 or DONE in told
        child = live(fork_server, folder, chance, peaceful=last)
        told += child.told
        # one for each write under way, one half deleted, and those of helpers that died before their trainer
        found = violations(folder / "store", told, leftovers_allowed=99)
        if wrong := [line for line in child.told if line.startswith("loss ") and line not in losses]:
            found.append(f"trained {wrong}")
        if not child.all("alone"):
            found.append("left processes behind")
        if found:
            return [f"life {number}: {each}; {child.account()}" for each in found]
        if last:
            break
    if child.status != 0 or DONE not in child.told or leftovers(folder / "store"):
        return [f"does not end well, with {leftovers(folder / 'store')}; {child.account()}"]
    return []


def live(fork_server: ForkServer, folder: Path, chance: random.Random, *, peaceful: bool) -> ForkedProcess:
    """One start of the job, with options and a fate of its own."""
    folder.mkdir(exist_ok=True)
    options = {
        "max_in_flight": chance.choice([1, 1, 2, 3]),
        "every": chance.choice([1, 2, 3, 5]),
        "keep": chance.choice([1, 2, 4, 12]),
        "seed": chance.randrange(2**32),
        # most errors are survived, and a life that trained to the end would leave nothing for the next
        "further": WHOLE if peaceful else chance.choice([4, 8, 16]),
    }
    how = "not at all" if peaceful else chance.choice(["killed", "terminated", "killed there", "fails", "failing"])
    with fork_server.spawn(
        "tests.support.training_workloads.wander", folder / "log", root=str(folder / "store"), **options
    ) as child:
        child.await_ready()
        with fault(child, folder / "trace", how, chance):
            child.let_go()
            if how in ("killed", "terminated"):
                strike(child, signal.SIGKILL if how == "killed" else signal.SIGTERM, chance)
            child.wait()
        child.wait_alone(ORPHAN_SECONDS)
    return child


def fault(
    child: ForkedProcess, trace: Path, how: str, chance: random.Random
) -> contextlib.AbstractContextManager[None]:
    where, when, error = chance.choice(MUTATING), chance.randint(1, 40), chance.choice(ERRORS)
    match how:
        case "killed there":
            return traced([child.pid], trace, f"inject={where}:signal=SIGKILL:when={when}")
        case "fails":
            return traced([child.pid], trace, f"inject={where}:error={error}:when={when}")
        case "failing":
            return traced([child.pid], trace, f"inject={where}:error={error}:when={when}+")
    return contextlib.nullcontext()


def strike(child: ForkedProcess, number: signal.Signals, chance: random.Random) -> None:
    """Send a signal some steps into its life, and some moments into the step."""
    steps, moment = chance.choice([0, 0, 1, 2, 5, 10, 20]), chance.uniform(0, 0.03)
    while len(child.all("loss ")) < steps and not child.all("exit "):
        child.listen(0.01)
    time.sleep(moment)  # the moment is what is left to chance
    with contextlib.suppress(ProcessLookupError):
        os.kill(child.pid, number)
