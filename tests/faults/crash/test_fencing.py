"""An attempt that wakes up after another has begun changes nothing any more."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.protocol.ids import checkpoint_id
from tests.support.crash_scenario import CrashScenario
from tests.support.fork_server import ForkedProcess, ForkServer
from tests.support.store_invariants import leftovers, violations
from tests.support.system_call_tracing import Point, traced
from tests.support.trial_pool import LONG, TrialPool

pytestmark = [pytest.mark.crash, pytest.mark.usefixtures("strace")]

PATIENCE_SECONDS = 300.0


def contents(root: Path) -> dict[str, str]:
    """Every file of the checkpoints and records, by what is in it."""
    files = [path for path in (root / "job").rglob("*") if path.is_file() and ".tmp-" not in str(path)]
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def is_locked(root: Path) -> bool:
    with open(root / "job" / ".lock") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def stopped(child: ForkedProcess, trace: Path) -> bool:
    """Wait until the injected stop has stopped it; False when it ended without."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while "stopped by SIGSTOP" not in trace.read_text():
        child.listen(0.005)
        if child.all("exit "):
            return False
        assert time.monotonic() < deadline, child.account()
    return True


def wake(child: ForkedProcess) -> None:
    """Let it go on to its end; each of its threads may be stopped in turn."""
    while not child.all("exit "):
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGCONT)
        child.listen(0.01)
    child.wait()


@contextlib.contextmanager
def stopped_at(
    point: Point, scenario: CrashScenario, fork_server: ForkServer, folder: Path
) -> Iterator[tuple[ForkedProcess, bool]]:
    """A first attempt, and whether it was stopped at `point`; it may be let go on until the end of the block."""
    root, trace = folder / "store", folder / "trace"
    with fork_server.spawn(scenario.workload, folder / "old", root=str(root), **scenario.options) as old:
        old.await_ready()
        with traced([old.pid], trace, point.inject("signal=SIGSTOP")):
            old.let_go()
            yield old, stopped(old, trace)


def spread(points: list[Point], count: int) -> list[Point]:
    return [points[i * len(points) // count] for i in range(min(count, len(points)))]


@pytest.mark.parametrize("runs", [12, pytest.param(60, marks=LONG)])
def test_a_stopped_attempt_that_wakes_up_publishes_and_deletes_nothing(
    stores: TrialPool, fast_path: Path, runs: int
) -> None:
    options = {"saves": 6, "keep": 1, "stubborn": True}
    scenario = CrashScenario(
        fast_path, "tests.support.store_workloads.train", options, restart={"saves": 1, "keep": 3}
    )
    points, _ = scenario.undisturbed(stores.one())
    begun = next(i for i, point in enumerate(points) if ".tmp-" in point.text)

    def trial(fork_server: ForkServer, point: Point) -> list[str]:
        folder = scenario.stage()
        root = folder / "store"
        with stopped_at(point, scenario, fork_server, folder) as (old, in_time):
            if not in_time:
                return [f"was not stopped: {old.account()}"]
            complete, locked = "durable 000000000006-1" in old.told, is_locked(root)
            if locked:  # then the new attempt has to wait for it, which it does for some seconds
                wake(old)
            new = scenario.again(fork_server, folder)
            before = contents(root)
            wake(old)
        if new.status != 0:
            return [f"the new attempt fails: {new.account()}"]
        found = violations(root, new.told)
        if contents(root) != before:
            found.append(f"the old attempt changed {set(contents(root).items()) ^ set(before.items())}")
        if not (complete or locked or old.all("refused ")):
            found.append(f"the old attempt was refused nothing: {old.account()}")
        if scenario.again(fork_server, folder).status != 0 or leftovers(root):
            found.append(f"after that there is {leftovers(root)}")
        within_lock.append(locked)
        return found

    within_lock: list[bool] = []
    found = stores.each(trial, spread(points[begun:], runs))
    print(f"{runs} attempts stopped, {sum(within_lock)} of them within a lock")
    assert not found, "\n".join(found)
    assert sum(within_lock) < runs / 2


@pytest.mark.parametrize("runs", [4, pytest.param(30, marks=LONG)])
def test_training_that_wakes_up_in_the_past_goes_on_and_leaves_the_store_alone(
    trainers: TrialPool, fast_path: Path, runs: int
) -> None:
    options = {"every": 2, "keep": 2, "until": 12}
    scenario = CrashScenario(
        fast_path,
        "tests.support.training_workloads.train",
        options | {"ready_at": 2},
        restart=options | {"until": 8},
    )
    points, undisturbed = scenario.undisturbed(trainers.one())
    losses = [line for line in undisturbed if line.startswith("loss ")]

    def trial(fork_server: ForkServer, point: Point) -> list[str]:
        folder = scenario.stage()
        root = folder / "store"
        with stopped_at(point, scenario, fork_server, folder) as (old, in_time):
            if not in_time or is_locked(root):
                return []  # what becomes of that, the test above has shown
            published = (root / "job" / checkpoint_id(options["until"], 1)).exists()
            new = scenario.again(fork_server, folder)
            before = contents(root)
            wake(old)
        found = violations(root, new.told)
        if contents(root) != before:
            found.append(f"the old attempt changed {set(contents(root).items()) ^ set(before.items())}")
        if old.status != 0 or [line for line in old.told if line.startswith("loss ")] != losses:
            found.append(f"the old attempt did not train to its end: {old.account()}")
        said = "another process has started this job (attempt 2,"
        if not published and not any(said in line for line in old.all("notice ")):
            found.append(f"nobody was told that the old attempt is none any more: {old.account()}")
        tried.append(point)
        return found

    tried: list[Point] = []
    found = trainers.each(trial, spread(points, runs))
    assert not found, "\n".join(found)
    assert len(tried) >= runs / 2
