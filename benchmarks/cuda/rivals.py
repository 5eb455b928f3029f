"""Stage `rivals`: Holdfast and other libraries in turns, by the benchmark of checkpoints."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from benchmarks.checkpoint.registry import OURS, PLAIN, TORCH_SAVE
from benchmarks.harness import ROOT

from .stages import CaseResult, Cases, Context, by_name

LIBRARIES = (
    OURS, PLAIN, TORCH_SAVE, "DCP async, thread", "DCP async, process", "torch_checkpointing",
    "nvidia-resiliency-ext",
)  # fmt: skip
FEW = (OURS, TORCH_SAVE)
GOAL_SLOWDOWN, GOAL_RESTORE = 0.5, 1.0
"""Holdfast ÷ the best of the others."""


def compared(context: Context) -> CaseResult:
    size = ["--quick"] if context.small else ["--state-gb", "2", "--brief"]
    command = [
        sys.executable, "-m", "benchmarks.checkpoint", "--device", context.device, "--folder", str(context.folder),
        *size, *(f"--only={name}" for name in (FEW if context.small else LIBRARIES)),
    ]  # fmt: skip
    lines = _output(command)
    figures: dict[str, Any] = json.loads(lines[-1].removeprefix("figures: "))
    values = {name: figures[name] for name in _MEASURES}
    left_out = [line.partition("left out")[2].strip() for line in lines if line.startswith("left out")]
    best = next((line for line in lines if line.startswith("best peers")), "")
    goals = {"slowdown_vs_best_peer": GOAL_SLOWDOWN, "restore_warm_vs_best_peer": GOAL_RESTORE}
    met = all(values[name] is not None and values[name] <= goal for name, goal in goals.items())
    note = "; ".join(filter(None, [best, *(f"left out {each}" for each in left_out)]))
    return CaseResult(values, context.judged(met), note)


def _output(command: list[str]) -> list[str]:
    """Return the lines that it printed; an error before the limit of the stage, with the turns that it had."""
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        output, errors = process.communicate(timeout=by_name("rivals").limit_seconds - 10)
    except subprocess.TimeoutExpired:
        process.terminate()  # it ends its workers
        output, _ = process.communicate()
        turns = [line.partition("] ")[2] for line in output.splitlines() if "durable after" in line]
        raise RuntimeError(f"the time was over after {'; '.join(turns) or 'no turn'}") from None
    if process.returncode:
        raise RuntimeError(errors[-400:])
    return output.splitlines()


_MEASURES = (
    "blocked_vs_best_peer", "slowdown_vs_best_peer", "durable_vs_best_peer", "restore_vs_best_peer",
    "restore_warm_vs_best_peer", "slowdown_of_an_iteration", "noise_of_an_iteration", "restore_warm_vs_bare_read",
)  # fmt: skip
CASES: Cases = {"2 GB": compared}
