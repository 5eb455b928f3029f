"""A disk that is too small costs checkpoints, but never the last sound one, and never the training."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import private_mounts
from tests.support.trial_pool import LONG, TrialPool

pytestmark = pytest.mark.crash

TIMES = 2.5


@pytest.mark.parametrize("saves", [10, pytest.param(100, marks=LONG)])
@pytest.mark.parametrize("keep", [1, 3])
def test_one_save_after_another_on_a_disk_of_two_and_a_half_checkpoints(
    trainers: TrialPool, tmp_path: Path, keep: int, saves: int
) -> None:
    if reason := private_mounts.why_not("tmpfs"):
        pytest.skip(f"{reason}: no disk was filled")
    with trainers.one().spawn("tests.support.training_workloads.fill", tmp_path / "log",
                place=str(tmp_path), saves=saves, keep=keep,
                              times=TIMES) as child:  # fmt: skip
        assert child.run() == 0, child.account()
    after = [tuple(map(int, line.split())) for line in child.all("after ")]
    assert [number for number, *_ in after] == list(range(1, saves + 2))
    assert all(leftovers <= 1 for *_, leftovers in after)
    assert [newest for _, newest, *_ in after] == sorted(newest for _, newest, *_ in after), "none was lost"
    assert all(newest >= 1 and sound >= 1 for _, newest, sound, _ in after)
    assert child.all("losses ") == ["are the same"]
    full = child.told[: child.told.index("room again")]
    assert all(newest == number for number, newest, *_ in after), "what is kept makes way for it"
    assert any(line.startswith("notice ") and "is full" in line for line in full) == (keep >= TIMES), full[-9:]
    assert after[-1][1] == saves + 1, "with room again, the next checkpoint is durable"
