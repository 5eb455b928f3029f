"""`exact_job` as a workload of a fork server, so that a test can kill it."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo

from tests.support.exact_job import DEVICE, ExactJob, ScriptError, seed_of_start

if TYPE_CHECKING:
    from tests.support.fork_server import WorkloadChannel


def _warm_up() -> None:
    """Have Python import here what each process would import by itself."""
    with tempfile.TemporaryDirectory() as store:
        job = ExactJob(store, every=10**9)
        job._backward(torch.arange(4), torch.ones(4, 6), torch.ones(4))
        job._update()
        job._record()
        job.session._close("SIGKILL")


def live(
    stage: WorkloadChannel,
    store: str,
    *,
    start: int,
    death: str | None,
    iteration: int,
    moment: str,
    **options: Any,
) -> None:
    """Train, telling each iteration, until the end or a death: in that iteration, or in the first one after it."""
    torch.set_num_threads(1)
    stage.ready()
    job = ExactJob(store, seed=seed_of_start(store, start), **options)
    for now in job.moments():
        in_iteration = job.session.iteration + (now != "stepped")
        if now == "stepped":
            _tell(stage, job)
        if death is not None and in_iteration >= iteration and now == moment:
            _die(death)
    _tell(stage, job)
    job.session.close()


def _tell(stage: WorkloadChannel, job: ExactJob) -> None:
    for iteration, record in job.log.items():
        stage.tell("iteration", json.dumps([iteration, record]))
    job.log.clear()


def _die(death: str) -> None:
    if death == "exception":
        raise ScriptError
    os.kill(os.getpid(), getattr(signal, death))


if DEVICE == "cpu":  # a process that is forked from one with CUDA cannot use it
    _warm_up()
