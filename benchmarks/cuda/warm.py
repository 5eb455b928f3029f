"""Stage `warm`: from SIGKILL to a new iteration on the device, by forks of a process with imports, and cold."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.harness import ROOT

from .stages import CaseResult, Cases, Context

SCRIPT = Path(__file__).with_name("warm_job.py")
GOAL = 0.5
KILLS = 2
TEMPLATE_SECONDS = 1.0
"""Until the process that warm starts are forked from has its imports."""


def restarts(context: Context) -> CaseResult:
    warm, cold = (min(_back_after(context, name)) for name in ("warm", "cold"))
    ratio = warm / cold
    values = {"warm_seconds": warm, "cold_seconds": cold, "warm_of_cold": ratio}
    return CaseResult(values, context.judged(ratio <= GOAL))


def _back_after(context: Context, name: str) -> list[float]:
    """Return the seconds from each SIGKILL of the trainer to the end of its next iteration."""
    kills = 1 if context.small else KILLS
    command = [
        sys.executable, "-m", "holdfast.cli", "run", *([] if name == "warm" else ["--no-warm"]), "--",
        sys.executable, str(SCRIPT), context.device, str(kills + 1),
    ]  # fmt: skip
    environment = os.environ | {"HOLDFAST_STORE": str(context.folder / name), "HOLDFAST_SERVER": ""}
    with (context.folder / f"{name}.log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=log, text=True
        )
    assert process.stdout is not None
    found: list[float] = []
    killed_at, killed_pid = 0.0, 0
    for line in process.stdout:
        if not line.startswith("{"):
            continue
        said = json.loads(line)
        if said["pid"] == killed_pid:
            continue  # it was printed before the kill
        if killed_pid:
            found.append(time.monotonic() - killed_at)
            killed_pid = 0
        elif len(found) < kills and said["iteration"] % 2 == 0:
            time.sleep(TEMPLATE_SECONDS)
            killed_at, killed_pid = time.monotonic(), said["pid"]
            os.kill(killed_pid, signal.SIGKILL)

    if process.wait() or len(found) < kills:
        raise RuntimeError(f"{name}: {(context.folder / f'{name}.log').read_text()[-400:]}")
    return found


CASES: Cases = {"restart": restarts}
