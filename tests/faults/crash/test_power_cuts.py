"""A power cut takes nothing that was acknowledged, on real file systems with real journals."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.support import private_mounts
from tests.support.fork_server import ForkServer
from tests.support.trial_pool import LONG, TrialPool

pytestmark = pytest.mark.crash

CONTROLS = 6


def cuts(pool: TrialPool, folder: Path, kind: str, trials: int, **options: object) -> tuple[list[str], int]:
    """What was wrong after power cuts on two disks at a time, half of them on each, and how many there were."""
    if reason := private_mounts.why_not(kind):
        pytest.skip(f"{reason}: no power was cut")
    seed = int(os.environ.get("HOLDFAST_TEST_SEED", time.time_ns() % 2**32))
    print(f"repeat these cuts with HOLDFAST_TEST_SEED={seed}")
    done = []

    def half(fork_server: ForkServer, number: int) -> list[str]:
        log, count = folder / f"log-{number}", (trials + number) // 2
        told = {"folder": str(folder), "kind": kind, "trials": count, "seed": seed + number}
        with fork_server.spawn("tests.support.power_cut_workloads.cuts", log, **told, **options) as child:
            assert child.run() == 0, child.account()
        done.extend(child.all("cut "))
        return child.all("wrong ")

    return pool.each(half, [0, 1]), len(done)


@pytest.mark.parametrize("after_ack", [True, False], ids=["right after an acknowledgement", "at any moment"])
@pytest.mark.parametrize(
    ("kind", "trials"),
    [("ext4", 20)] + [pytest.param(kind, count, marks=LONG) for kind, count in [("ext4", 200), ("xfs", 60)]],
)
def test_what_was_acknowledged_is_there_after_a_power_cut(
    stores: TrialPool, fast_path: Path, kind: str, trials: int, after_ack: bool
) -> None:
    wrong, done = cuts(stores, fast_path, kind, trials, after_ack=after_ack)
    assert not wrong, "\n".join(wrong)
    assert done == trials


@pytest.mark.parametrize("skipping", ["directories", "files"])
@pytest.mark.parametrize("kind", ["ext4", pytest.param("xfs", marks=LONG)])
def test_these_power_cuts_would_show_a_missing_fsync(
    stores: TrialPool, fast_path: Path, kind: str, skipping: str
) -> None:
    """The control: a store that leaves out one sync loses what it acknowledged, and it is seen."""
    wrong, done = cuts(stores, fast_path, kind, CONTROLS, after_ack=True, skipping=skipping)
    assert done == CONTROLS
    lost = {line.split(" after ")[0] for line in wrong}
    print(f"{len(lost)} of {done} cuts showed that {skipping} were not synced")
    assert len(lost) == CONTROLS, wrong
