"""Stage `tests`: the end-to-end tests of exact resume and of copies during updates, on the device."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from .stages import CaseResult, Context

ROOT = Path(__file__).resolve().parents[2]
FILES = (
    "test_device_copies.py",
    "exact/test_kills.py",
    "exact/test_in_place_restores.py",
    "exact/test_omitted_state.py",
    "exact/test_no_interference.py",
)
WORKERS = 8


def cases(context: Context) -> list[tuple[str, Callable[[], CaseResult]]]:
    files = FILES[:1] if context.small else FILES
    return [(name.removesuffix(".py"), partial(passed, context, name)) for name in files]


def passed(context: Context, name: str) -> CaseResult:
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
