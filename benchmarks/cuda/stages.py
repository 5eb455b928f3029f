"""The stages, in the order of their value. Imports no torch: the driver must take nothing from the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple


class CaseResult(NamedTuple):
    values: dict[str, Any]
    met: bool | None = None
    """Whether the goal is met; `None` where this device or size cannot show it."""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Context:
    """Where and how a stage runs. `small` is for tests without a device."""

    device: str
    small: bool
    folder: Path
    """A folder of the stage, in memory where the machine has enough: checkpoints are not to wait for a disk."""
    disk: Path
    """A folder on a disk."""

    def judged(self, is_met: bool) -> bool | None:
        return None if self.small else is_met


@dataclass(frozen=True, slots=True)
class Stage:
    name: str
    what: str
    goal: str
    estimate_seconds: int
    """Expected duration on one H100 or H200."""
    limit_seconds: int
    """After this time the stage is ended; the cases that it has written stay."""
    module: str
    """Module of this package with CASES."""
    by_name: bool = False
    """Run only where it is named: the whole takes less than nine minutes without it."""


STAGES = (
    Stage(
        "exact",
        "small GPT in bf16 with fused AdamW, dropout and loader workers: 5 SIGKILLs, restore in place, undo, a "
        "second session in one process",
        "losses equal bit for bit with deterministic kernels; samples, random state and position equal without",
        80, 120, "exact",
    ),
    Stage(
        "torn",
        "updates right after a checkpoint, writes through .data, CUDA graphs with and without wait_copied, "
        "streams of the script, torch.compile",
        "every checkpoint holds the state of its iteration, or is detected as torn",
        40, 80, "torn",
    ),
    Stage(
        "copy",
        "states of 1, 4 and 16 GB: the copy against a bare pinned copy, time that training is blocked, slow-down",
        "at least 0.9 of the bare copy from 4 GB; blocked below 1 ms; slow-down at most 2 % of an iteration",
        90, 130, "copying",
    ),
    Stage(
        "budget",
        "GPT of 2 GB state, one minute with a budget of 3.5 %, with and without by turns",
        "the overhead is inside the budget",
        70, 90, "budget",
    ),
    Stage(
        "rivals",
        "2 GB: DCP async_save (thread, process), torch_checkpointing, nvidia-resiliency-ext, torch.save, in turns",
        "slow-down at most half of the best; restore at least as fast as the best, with verification",
        120, 170, "rivals",
    ),
    Stage(
        "restore",
        "8 GB from the memory tier, the page cache and a disk",
        "at least 0.8 of the bare copy of the slower part",
        65, 110, "restoring",
    ),
    Stage(
        "every",
        "a checkpoint after each iteration, with memory for two",
        "overhead at most 3.5 %",
        15, 40, "every",
    ),
    Stage(
        "many",
        "12 processes on one device; two ranks on one device over NCCL, or gloo",
        "the reason of each failure is known",
        30, 60, "many",
    ),
    Stage(
        "warm",
        "SIGKILL to a new iteration on the device, with `holdfast run` and with `--no-warm`",
        "at most 0.5 of a cold start",
        25, 60, "warm",
    ),
    Stage(
        "host",
        "an array of 1 GB on the host, written from forks of a process whose device is initialized",
        "exact; a child has no device open",
        15, 40, "host", by_name=True,
    ),
    Stage(
        "hash",
        "incremental checkpoints: hash trees over the rows of 1 GB, on the device and on the host",
        "equal trees; at least 10 times the host's rate",
        15, 40, "hashing", by_name=True,
    ),
    Stage(
        "managed",
        "tensors in managed memory of a pluggable allocator: snapshot and restore in place",
        "exact; pages stay on the device",
        10, 40, "managed", by_name=True,
    ),
    Stage(
        "tests",
        "the tests of exact resume and of copies during updates",
        "they pass",
        150, 240, "suites", by_name=True,
    ),
)  # fmt: skip


Cases = dict[str, Callable[[Context], CaseResult]]
"""Of a stage, by name. A module may have SMALL_CASES, the number of those that run with small sizes."""


def by_name(name: str) -> Stage:
    return next(stage for stage in STAGES if stage.name == name)
