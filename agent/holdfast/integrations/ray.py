"""Adapter for Ray Train: every durable checkpoint of a session is reported to Ray, by reference.

def train() -> None:  # the training function of each worker
    session = holdfast.Session("my-job", model=model, optimizer=optimizer, store="/shared/checkpoints")
    holdfast.integrations.ray.report(session)
"""

from __future__ import annotations

import functools
import math
import time
from collections import deque
from concurrent.futures import Future, wait
from typing import Any

import ray.train

from holdfast.save.run import Run, RunState
from holdfast.session import Session
from holdfast.system import io_pool

INTERVAL_SECONDS = 4.0
"""Least time between two reports: Ray's controller fetches one from each worker every 2 s, another one waits."""
WAIT_SECONDS = 60.0
"""How long training waits for the other workers in a report."""


class CheckpointReporter:
    """Reports the checkpoints of one session to Ray Train: a `CollectiveCall`, which listens to runs on rank 0.

    A reference is a directory in Ray's storage that holds only the metadata of a `ray.train.Checkpoint`: Ray
    accepts no directory elsewhere, and would delete those of the store by its own rules.
    """

    def __init__(self, session: Session, storage: Any) -> None:
        self._session, self._storage = session, storage
        self._durable: deque[Run] = deque(maxlen=1)
        """The newest durable run that is not reported yet; a background thread appends it."""
        self._reference: Future[tuple[dict[str, Any], Any]] | None = None
        """Metrics and reference of the next report, once the reference is written."""
        self._reported_at = -INTERVAL_SECONDS
        self._has_failed = False

    def run_changed(self, run: Run, state: RunState) -> None:
        if state is RunState.DURABLE:
            self._durable.append(run)

    def is_due(self, *, at_end: bool) -> bool:
        if self._has_failed or not (at_end or time.monotonic() >= self._reported_at + INTERVAL_SECONDS):
            return False
        if at_end and self._reference is not None:  # of an earlier checkpoint, if there is a newer one
            wait([self._reference], WAIT_SECONDS)
        if self._durable and (self._reference is None or at_end):
            self._reference = io_pool.submit(functools.partial(self._refer, self._durable.popleft()))
        if self._reference is None:
            return False
        if at_end:
            wait([self._reference], WAIT_SECONDS)
        if self._reference.done() and (error := self._reference.exception()) is not None:
            self._reference = None  # the next checkpoint tries again
            self._warn(f"a checkpoint is not reported to Ray, because its reference could not be written: {error}")
        return self._reference is not None and self._reference.done()

    def _refer(self, run: Run) -> tuple[dict[str, Any], Any]:
        draft, filesystem = run.draft, self._storage.storage_filesystem
        path = f"{self._storage.experiment_fs_path}/checkpoint_{draft.job}_{run.id}"
        where = {"store": self._session.store, "job": draft.job, "checkpoint": run.id}
        filesystem.create_dir(path, recursive=True)
        reference = ray.train.Checkpoint(path, filesystem=filesystem)
        reference.set_metadata({"holdfast": where})
        metrics = {name: each.value for name, each in draft.metrics.items() if math.isfinite(each.value)}
        return {**metrics, "iteration": draft.iteration}, reference

    def __call__(self) -> None:
        """Report the reference, which only rank 0 has; Ray waits until all workers have called it."""
        metrics, reference = self._reference.result() if self._reference is not None else ({}, None)
        self._reference = None

        def send() -> None:
            no_upload = ray.train.CheckpointUploadMode.NO_UPLOAD
            ray.train.report(metrics, checkpoint=reference, checkpoint_upload_mode=no_upload)

        try:  # on another thread, since Ray waits without a limit
            io_pool.submit_helpers(send, 1)[0].result(WAIT_SECONDS)
        except Exception as error:  # of Ray or of its storage: training goes on without reports
            self._has_failed = True
            reason = (
                f"a report took longer than {WAIT_SECONDS:.0f} s" if isinstance(error, TimeoutError) else error
            )
            self._warn(f"no further checkpoints are reported to Ray: {reason}")
        self._reported_at = time.monotonic()

    def _warn(self, what: str) -> None:
        self._session.notice("warning", "ray", what)


def report(session: Session) -> None:
    """Report every checkpoint of a session to Ray Train once it is durable, with the metrics of its iteration.

    Call it once on every worker, in the training function, after the session is created and before its first
    iteration. Reports are made in `session.step`, on all workers at the same iteration, at most one every 4 s. If
    several checkpoints became durable meanwhile, the newest is reported. `session.close` reports the last one.

    `get_metadata()["holdfast"]` of a reported checkpoint has its `store`, `job` and `checkpoint`. If a report
    fails, a notice says so, and training goes on without. With `num_workers=0`, nothing is reported.

    Args:
        session: the session.

    Raises:
        RuntimeError: this is not the training function of a Ray Train worker.
        ValueError: the session does not include all workers of the run.
    """
    context = ray.train.get_context()
    if (workers := context.get_world_size()) != session.world_size:
        raise ValueError(
            f"report(session): Ray Train has {workers} workers, the session {session.world_size} ranks: "
            "all workers report together. Use ray.train.torch.TorchTrainer, which sets up torch.distributed"
        )
    try:
        storage = context.get_storage()
    except NotImplementedError:  # local mode
        return
    reporter = CheckpointReporter(session, storage)
    session.call_together(reporter)
    if session.rank == 0:
        session.observe(reporter)
