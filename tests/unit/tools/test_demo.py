"""The demo reads the log of `holdfast run`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))

from demo import Demo

from holdfast.supervisor.hang_detector import RestartProgress


@pytest.mark.parametrize("iteration", [87, 1106])
def test_the_demo_reads_the_iteration_at_which_the_trainer_was_killed(tmp_path: Path, iteration: int) -> None:
    progress = RestartProgress()
    progress.update(iteration, steps=iteration)
    demo = Demo(tmp_path)
    demo.log.write_text(f"the trainer ended (killed by SIGKILL) {progress.description}; restarting it in 0.1 s\n")
    assert demo.kills() == [iteration]
