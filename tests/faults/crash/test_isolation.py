"""What a checkpoint holds is the state of its instant, whatever training does the moment after."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.trial_pool import TrialPool

pytestmark = pytest.mark.crash


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_everything_overwritten_right_after_a_snapshot_is_stored_as_it_was(
    trainers: TrialPool, fast_path: Path, max_in_flight: int
) -> None:
    rounds = 5
    options = {
        "root": str(fast_path / "store"),
        "rounds": rounds,
        "max_in_flight": max_in_flight,
    }
    with trainers.one().spawn("tests.support.training_workloads.overwrite", fast_path / "log", **options) as child:
        assert child.run() == 0, child.account()
    assert child.all("round ") == [f"{number} the same" for number in range(1, rounds + 1)]
