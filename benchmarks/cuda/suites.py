"""Stage `tests`: the end-to-end tests of exact resume and of copies during updates, on the device."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial

from benchmarks.harness import ROOT

from .stages import CaseResult, Cases, Context

FILES = (
    "test_device_copies.py",
    "exact/test_kills.py",
    "exact/test_in_place_restores.py",
    "exact/test_omitted_state.py",
    "exact/test_no_interference.py",
)
WORKERS = 8


def passed(name: str, context: Context) -> CaseResult:
    """Run the tests of a file; needs pytest, pytest-xdist, pytest-timeout and hypothesis."""
    command = [
        sys.executable, "-m", "pytest", "-q", "-m", "not long", "-p", "no:cacheprovider",
        *(["-n", "0"] if context.small else ["-n", str(WORKERS)]), f"tests/end_to_end/{name}",
    ]  # fmt: skip
    environment = os.environ | {"HOLDFAST_TEST_DEVICE": context.device}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    failed = [line.removeprefix("FAILED ") for line in lines if line.startswith(("FAILED", "ERROR"))]
    summary = lines[-1] if lines else done.stderr[-200:]
    return CaseResult({"summary": summary}, not done.returncode, "; ".join(failed))


CASES: Cases = {name.removesuffix(".py"): partial(passed, name) for name in FILES}
SMALL_CASES = 1
