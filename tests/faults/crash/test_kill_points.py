"""Killed at any system call, a job loses nothing that was acknowledged, and starts again by itself."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.crash_scenario import CrashScenario
from tests.support.fork_server import ForkServer
from tests.support.store_invariants import leftovers
from tests.support.system_call_tracing import Point
from tests.support.trial_pool import LONG, TrialPool, covering

pytestmark = [pytest.mark.crash, pytest.mark.usefixtures("strace")]

SMALL, LARGE = 50_000, 20 << 20
"""One is written in one go, the other in several."""
UNSEEN = ("fsync", "fdatasync", "close", "flock", "fcntl")
"""Whether such a call was made before a kill, nobody can tell who looks at the store."""
WHOLE = pytest.param(True, marks=LONG, id="every call")
SWEEPS = pytest.mark.parametrize("whole", [pytest.param(False, id="one call of each kind"), WHOLE])


def chosen(points: list[Point], whole: bool) -> list[Point]:
    return points if whole else covering(points, lambda at: at.syscall if at.syscall in UNSEEN else at.kind)


def assert_no_violation(pool: TrialPool, scenario: CrashScenario, points: list[Point]) -> None:
    def trial(fork_server: ForkServer, point: Point) -> list[str]:
        return scenario.killed_at(fork_server, point)[0]

    found = pool.each(trial, points)
    print(f"{len(points)} kills, {len(found)} violations")
    assert not found, "\n".join(found)


@SWEEPS
@pytest.mark.parametrize("size_bytes", [SMALL, LARGE])
def test_a_store_survives_a_kill_at_every_system_call(
    stores: TrialPool, tmp_path: Path, fast_path: Path, size_bytes: int, whole: bool
) -> None:
    options = {"saves": 4, "keep": 2, "rewind": True, "size_bytes": size_bytes}
    place = tmp_path if size_bytes == LARGE else fast_path  # past the page cache, there has to be a disk
    scenario = CrashScenario(place, "tests.support.store_workloads.train", options, restart={"saves": 1})
    points, _ = scenario.undisturbed(stores.one())
    changes = {"mkdirat", "openat", "fsync", "renameat", "linkat", "unlinkat", "close"}
    assert changes <= {point.syscall for point in points}
    if size_bytes == LARGE and not whole:  # all else is as with a small one
        points = [point for point in points if ".safetensors" in point.text]
    assert_no_violation(stores, scenario, chosen(points, whole))


@SWEEPS
def test_a_store_whose_checkpoints_share_a_file_survives_a_kill_at_every_system_call(
    stores: TrialPool, fast_path: Path, whole: bool
) -> None:
    options = {"saves": 4, "keep": 2, "rewind": True, "size_bytes": 1 << 20, "shares": True}
    workload, restart = "tests.support.store_workloads.train", {"saves": 1, "shares": True, "size_bytes": 1 << 20}
    scenario = CrashScenario(fast_path, workload, options, restart)
    points, _ = scenario.undisturbed(stores.one())
    links = [point for point in points if point.syscall == "linkat" and ".safetensors" in point.text]
    assert len(links) == 4, "each save after the first links the base"
    assert_no_violation(stores, scenario, chosen(points, whole))


@SWEEPS
def test_a_restart_after_a_crash_survives_a_kill_at_every_system_call(
    stores: TrialPool, fast_path: Path, whole: bool
) -> None:
    """What clears away the leftovers of a crash may be killed as well."""
    crashed = fast_path / "crashed"
    scenario = CrashScenario(
        fast_path, "tests.support.store_workloads.train", {"saves": 3, "keep": 1}, restart={"saves": 1}
    )
    points, _ = scenario.undisturbed(stores.one())
    publishing = [p for p in points if p.syscall.startswith("rename") and ".tmp-" in p.text]
    scenario.hit(stores.one(), crashed, publishing[-2].inject("signal=SIGKILL"))
    assert leftovers(crashed / "store"), "there is something to clear away"

    scenario = CrashScenario(
        fast_path / "again", "tests.support.store_workloads.train", {"saves": 1}, restart={"saves": 1},
        prepare=lambda root: shutil.copytree(crashed / "store", root, dirs_exist_ok=True) and None,
    )  # fmt: skip
    points, _ = scenario.undisturbed(stores.one())
    assert any(".tmp-" in point.text and "AT_REMOVEDIR" in point.text for point in points)
    assert_no_violation(stores, scenario, chosen(points, whole))


@SWEEPS
def test_training_survives_a_kill_at_every_system_call(trainers: TrialPool, fast_path: Path, whole: bool) -> None:
    """With saves, retention and a restore in place; its restarts repeat the undisturbed losses to the bit."""
    options = {"every": 2, "keep": 2, "until": 8}
    scenario = CrashScenario(
        fast_path,
        "tests.support.training_workloads.train",
        {**options, "rewind_at": 5},
        options,
    )
    points, undisturbed = scenario.undisturbed(trainers.one())
    losses = {line for line in undisturbed if line.startswith("loss ")}
    assert "ground 2 4" in undisturbed, "it goes back in place"

    def trial(fork_server: ForkServer, point: Point) -> list[str]:
        found, told = scenario.killed_at(fork_server, point)
        if wrong := [line for line in told if line.startswith("loss ") and line not in losses]:
            found.append(f"{wrong} is not what undisturbed training gives")
        if "done 8" not in told:
            found.append("did not train to the end")
        return found

    cases = chosen(points, whole)
    found = trainers.each(trial, cases)
    print(f"{len(cases)} kills of {len(points)} points, {len(found)} violations")
    assert not found, "\n".join(found)
