"""Whatever a disk answers, training goes on to the same losses, says so, and the next checkpoint is good."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.crash_scenario import CrashScenario
from tests.support.fork_server import ForkedProcess, ForkServer
from tests.support.store_invariants import acknowledged, leftovers, safe, violations
from tests.support.system_call_tracing import Point
from tests.support.trial_pool import LONG, TrialPool, covering

pytestmark = [pytest.mark.crash, pytest.mark.usefixtures("strace")]

UNTIL = 6
DATA = ("write", "pwrite64", "pwritev", "pwritev2", "fallocate")
REFUSED = {
    **dict.fromkeys(("fsync", "fdatasync", "close"), ("EIO", "ENOSPC", "EDQUOT")),
    **dict.fromkeys(("renameat", "linkat"), ("EIO", "ENOSPC", "EROFS")),
    **dict.fromkeys(("unlink", "unlinkat"), ("EIO", "EACCES")),
    **dict.fromkeys(("mkdir", "mkdirat", "openat"), ("ENOSPC", "EROFS")),
    **dict.fromkeys(DATA, ("ENOSPC", "EIO", "EDQUOT")),
    "flock": ("EIO", "ENOLCK"),
}
LASTING = {
    "fsync": "EIO",
    "fdatasync": "EIO",
    "mkdirat": "EROFS",
    "renameat": "EROFS",
    **dict.fromkeys(DATA, "ENOSPC"),
}
INTERRUPTED = ("openat", "write", "pwrite64", "pwritev", "fsync", "fdatasync", "fallocate", "flock")
WRITTEN = re.compile(r"\.tmp-\d+-\d+-\d+-\w+")
"""A directory in which a checkpoint is in the making."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What a system call answers instead of doing its work, once or from then on."""

    point: Point
    answer: str
    lasting: bool = False

    def __str__(self) -> str:
        return f"{self.answer}{' from then on' if self.lasting else ''} at {self.point}"

    @property
    def kind(self) -> tuple[str, str, bool]:
        return self.point.syscall, self.answer, self.lasting

    @property
    def injection(self) -> str:
        return self.point.inject(self.answer) + ("+" if self.lasting else "")


def faults(points: list[Point]) -> Iterator[Fault]:
    for point in points:
        yield from (Fault(point, f"error={error}") for error in REFUSED.get(point.syscall, ()))
        if point.syscall in INTERRUPTED:
            yield Fault(point, "error=EINTR")
        if point.syscall in ("write", "pwrite64", "pwritev"):
            yield Fault(point, "retval=0")  # as short as a write can be
        if point.syscall in LASTING:
            yield Fault(point, f"error={LASTING[point.syscall]}", lasting=True)


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=LONG)])
def test_an_error_of_any_system_call_costs_no_more_than_a_checkpoint(
    trainers: TrialPool, fast_path: Path, whole: bool
) -> None:
    options = {"every": 2, "keep": 2, "until": UNTIL}
    scenario = CrashScenario(
        fast_path, "tests.support.training_workloads.train", options, restart={**options, "until": UNTIL + 2}
    )
    points, undisturbed = scenario.undisturbed(trainers.one())
    longer = scenario.again(trainers.one(), scenario.stage()).all("loss ")

    def trial(fork_server: ForkServer, fault: Fault) -> list[str]:
        folder = scenario.stage()
        child = scenario.hit(fork_server, folder, fault.injection)
        found = wrong_with(child, undisturbed, folder)
        if fault.lasting or leftovers(folder / "store") or safe(folder / "store") != (1, UNTIL):
            found += wrong_with_restart(scenario, fork_server, folder, longer)
        if not found:
            shutil.rmtree(folder)
        return found

    cases = (
        list(faults(points)) if whole else covering(faults(points), lambda it: it.kind, lambda it: it.point.kind)
    )
    found = trainers.each(trial, cases)
    print(f"{len(cases)} faults, {len(found)} violations")
    assert not found, "\n".join(found)


def wrong_with(child: ForkedProcess, undisturbed: list[str], folder: Path) -> list[str]:
    """A run under a fault is the undisturbed one, but for checkpoints that are late, which it tells of."""
    hits = (folder / "trace").read_text().count("INJECTED")
    if not hits:
        return [f"was not hit: {child.account()}"]
    if child.status != 0:
        # what cannot be read at the start is no reason to start from nothing, but to start again
        refused = child.refused and not child.all("loss ")
        return [] if refused else [f"ended training with {child.status}: {child.account()}"]
    found = violations(folder / "store", child.told, leftovers_allowed=hits)
    if child.all("loss ") != [line.removeprefix("loss ") for line in undisturbed if line.startswith("loss ")]:
        found.append("changed a loss")
    late = acknowledged(child.told) != acknowledged(undisturbed) or safe(folder / "store") != (1, UNTIL)
    if late and not child.all("notice "):
        found.append(f"cost a checkpoint and was not told of: {child.account()}")
    return found + published_in_spite((folder / "trace").read_text())


def published_in_spite(trace: str) -> list[str]:
    """What was written with an error and then made a checkpoint all the same: nobody knows what the disk has."""
    failed, found = set[str](), []
    for line in trace.splitlines():
        written = WRITTEN.search(line)
        if written and "(INJECTED)" in line and " = -1 " in line and "EINTR" not in line:
            failed.add(written[0])
        elif "-discarded" in line:  # set aside to be removed
            continue
        elif " rename" in line and line.endswith(" = 0") and written and written[0] in failed:
            found.append(f"was published in spite of it: {line}")
    return found


def wrong_with_restart(
    scenario: CrashScenario, fork_server: ForkServer, folder: Path, losses: list[str]
) -> list[str]:
    """With the fault over it goes on as if there had been none."""
    again = scenario.again(fork_server, folder)
    if again.status != 0:
        return [f"does not start again: {again.account()}"]
    found = violations(folder / "store", again.told)
    if not again.all("loss ") or again.all("loss ") != losses[-len(again.all("loss ")) :]:
        found.append("changed a loss after a restart")
    if safe(folder / "store")[1] != UNTIL + 2:
        found.append(f"has no checkpoint of the end once the fault is over, but of {safe(folder / 'store')}")
    if left := leftovers(folder / "store"):
        found.append(f"leaves {left} after a restart")
    return found
