"""Whoever is killed at whichever step of a restore, wherever the network breaks: it happens once, or says why."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from tests.support.fork_server import ForkServer
from tests.support.restore_faults import (
    RestoreFaultCase,
    RestoreFaultScenario,
    RestoreOutcome,
    Struck,
    undisturbed,
)
from tests.support.trial_pool import LONG, TrialPool

pytestmark = pytest.mark.processes

IN_PLACE = (
    "accepted", "handed out", "heard", "delivered", "taken up", "safety begun", "safety committed",
    "verifying", "verified", "noting", "noted", "applying", "applied", "told", "learned", "first step",
)  # fmt: skip
AT_A_START = ("attempt begun", "verifying", "taken up", "applying", "applied", "noting", "noted", "told")
KILLED: tuple[Struck, ...] = ("agent", "supervisor", "server")
CUT: tuple[Struck, ...] = ("cut", "hold")
CASES = [
    *(RestoreFaultCase(point, struck) for point in IN_PLACE for struck in KILLED),
    *(RestoreFaultCase(point, struck) for point in ("before delivery", "delivered", "noted") for struck in CUT),
    *(
        RestoreFaultCase(point, "cut")
        for point in ("accepted", "taken up", "safety committed", "applied", "told", "learned")
    ),
    *(RestoreFaultCase(point, struck, "at a start") for point in AT_A_START for struck in KILLED),
    *(RestoreFaultCase(point, "cut", "at a start") for point in ("attempt begun", "noted")),
    *(
        RestoreFaultCase("between end and start", struck, "at a start")
        for struck in ("supervisor", "server", "cut", "hold")
    ),
    *(
        RestoreFaultCase("heard while waiting", struck, "while waiting")
        for struck in ("supervisor", "server", "cut", "hold")
    ),
    *(
        RestoreFaultCase("before delivery", struck, fate=fate)
        for struck in CUT
        for fate in ("cancelled", "expired")
    ),
    *(RestoreFaultCase("verifying", struck, fate="damaged") for struck in ("agent", "server")),
]
assert len(CASES) == 100
FEW = [
    RestoreFaultCase("accepted", "server"),
    RestoreFaultCase("noted", "agent"),
    RestoreFaultCase("applying", "supervisor"),
    RestoreFaultCase("attempt begun", "agent", "at a start"),
    RestoreFaultCase("before delivery", "hold", fate="cancelled"),
    RestoreFaultCase("heard while waiting", "cut", "while waiting"),
]


@pytest.fixture(scope="module")
def servers() -> Iterator[TrialPool]:
    pool = TrialPool("tests.support.interruptible_server")
    yield pool
    pool.close()


@pytest.mark.parametrize("cases", [pytest.param(FEW, id="few"), pytest.param(CASES, id="all", marks=LONG)])
def test_an_order_happens_once_or_ends_with_a_reason(
    servers: TrialPool, tmp_path: Path, migrated: Path, cases: list[RestoreFaultCase]
) -> None:
    ends: list[RestoreOutcome] = []
    numbers = count()

    def trial(fork_server: ForkServer, case: RestoreFaultCase) -> list[str]:
        folder = tmp_path / str(number := next(numbers))
        folder.mkdir()
        database = Path(shutil.copy(migrated, folder / "holdfast.db"))
        try:
            chaos = RestoreFaultScenario(case, fork_server, folder, f"chaos-{number}", database)
            try:
                ends.append(ended := chaos.run())
            finally:
                chaos.close()
        except Exception as error:  # one case that cannot be judged is wrong; the others go on
            return [repr(error)]
        last = ended.order.transitions[-1]
        result = f"{last.state} {last.reason or ''} {ended.wrong or ''}"
        print(f"{number + 1}: {case.struck} at {case.point!r} {case.way}: {result}")
        return ended.wrong

    wrong = servers.each(trial, cases)
    expected = undisturbed(tmp_path, max(line.iteration for ended in ends for line in ended.lines))
    off = [ended for ended in ends if any(line.outcome != expected[line.iteration] for line in ended.lines)]
    once = sum(ended.order.state == "restored" and ended.times == 1 for ended in ends)
    told = sum(ended.order.state != "restored" and ended.times == 0 for ended in ends)
    twice = sum(ended.times > 1 for ended in ends)
    print(
        f"restore chaos: {len(cases)} orders, {once} applied once, {told} ended with a reason, {twice} twice, "
        f"{len(off)} trajectories off"
    )
    assert not wrong, "\n".join(wrong)
    assert (once + told, twice, off) == (len(cases), 0, [])
