"""A job whose launcher restarts it after it has died goes on from its newest checkpoint."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("launched_script.py")
NVRX = "nvidia_resiliency_ext"
needs_nvrx = pytest.mark.skipif(importlib.util.find_spec(NVRX) is None, reason=f"{NVRX} is not installed")
FT_LAUNCHER = f"from {NVRX}.fault_tolerance.launcher import main; main()"
LAUNCHERS = {
    "torchrun": ["-m", "torch.distributed.run"],
    "ft_launcher": pytest.param(["-c", FT_LAUNCHER], marks=needs_nvrx),
}


@pytest.mark.parametrize("launcher", LAUNCHERS.values(), ids=LAUNCHERS.keys())
def test_a_job_that_its_launcher_restarts_resumes(tmp_path: Path, launcher: list[str]) -> None:
    ledger = tmp_path / "losses"
    options = [
        "--nnodes", "1", "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-backend", "c10d",
        "--rdzv-endpoint", "127.0.0.1:0",
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, *launcher, *options, str(SCRIPT), str(tmp_path / "store"), str(ledger)],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "attempt 2 resumed from iteration 7" in done.stderr + done.stdout
    assert [int(line.split()[0]) for line in ledger.read_text().splitlines()] == list(range(12))
