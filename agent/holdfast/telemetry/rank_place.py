"""Where a rank runs: its host, its device, and its job of the scheduler."""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Mapping

from holdfast import accelerators
from holdfast.errors import printable
from holdfast.protocol.wire import RankPlace

SCHEDULERS = {
    "SLURM_JOB_ID": "Slurm job", "PBS_JOBID": "PBS job", "LSB_JOBID": "LSF job", "JOB_ID": "Grid Engine job",
}  # fmt: skip
"""Environment variables with the id of a scheduler's job."""


def rank_place() -> RankPlace:
    """Return the place of this process."""
    return RankPlace(
        at=time.time(),
        host=platform.node(),
        device=printable(_device()),
        scheduler_job=printable(scheduler_job(os.environ)),
    )


def scheduler_job(environment: Mapping[str, str]) -> str:
    """Return the scheduler's job in words, such as `Slurm job 4711` or `pod train-0`; empty without one."""
    for variable, name in SCHEDULERS.items():
        if value := environment.get(variable):
            array = environment.get("SLURM_ARRAY_TASK_ID") if variable == "SLURM_JOB_ID" else None
            return f"{name} {value}" + (f", task {array}" if array else "")
    if "KUBERNETES_SERVICE_HOST" in environment:
        return f"pod {environment.get('POD_NAME') or environment.get('HOSTNAME') or platform.node()}"
    return ""


def _device() -> str:
    """Return the name of the accelerator that this process uses; empty if it uses none, or it cannot be named."""
    with contextlib.suppress(Exception):  # a report must not end training
        for kind, module in accelerators.modules_in_use().items():
            number = module.current_device()
            return f"{module.get_device_name(number)}, {kind}:{number}"
    return ""
