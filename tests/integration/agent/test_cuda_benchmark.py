"""The benchmark of copies from a CUDA device, run on the CPU: it prints a row for each mode, and figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_the_benchmark_of_devices_measures_both_modes_and_prints_figures(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "benchmarks.cuda",
        "--device",
        "cpu",
        "--sizes",
        "1",
        "--folder",
        str(tmp_path),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    modes = [line.split()[2] for line in done.stdout.splitlines() if line.startswith(" 0.03 GB")]
    assert modes == ["cpu", "gpu"]
    figures = json.loads(done.stdout.splitlines()[-1].removeprefix("figures: "))
    assert figures["torn"] == 0
    assert 0 < figures["pinned_copy_share"] < 10
    assert list(tmp_path.iterdir()) == []
