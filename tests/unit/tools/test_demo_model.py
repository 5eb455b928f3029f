"""The model of the demo is chosen so that an iteration takes about a tenth of a second."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))

from demo_model import SIZES, choose_model, choose_threads

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("milliseconds", "chosen"),
    [
        ([30, 60, 150], (192, 3, 6)),  # the largest that fits, with more samples up to the target
        ([30, 90, 91], (192, 3, 4)),
        ([1, 2, 4, 9], (384, 5, 40)),
        ([0.1, 0.2, 0.3, 0.4], (384, 5, 64)),  # a limit to the samples
        ([180], (128, 2, 2)),  # none fits: fewer samples
        ([9000], (128, 2, 1)),
    ],
)
def test_the_largest_model_that_fits_the_target_is_chosen(
    milliseconds: list[float], chosen: tuple[int, int, int]
) -> None:
    measured = {size: each / 1000 for size, each in zip(SIZES, milliseconds, strict=False)}
    assert choose_model(measured) == chosen


@pytest.mark.parametrize(
    ("cores", "load", "threads"), [(1, 0.0, 1), (2, 0.1, 1), (16, 1.0, 8), (16, 8.5, 1), (2, 9.0, 1)]
)
def test_busy_cores_get_one_thread(cores: int, load: float, threads: int) -> None:
    assert choose_threads(cores, load) == threads


@pytest.mark.processes
def test_the_training_script_takes_the_options_that_are_printed(tmp_path: Path) -> None:
    tool = [sys.executable, str(ROOT / "tools" / "demo_model.py")]
    printed = subprocess.run(tool, capture_output=True, check=True, text=True).stdout
    script = [sys.executable, str(ROOT / "examples" / "char_gpt.py"), "--epochs", "0", "--store", str(tmp_path)]
    ended = subprocess.run([*script, *shlex.split(printed)], capture_output=True, check=False, text=True)
    assert ended.returncode == 0, ended.stderr
