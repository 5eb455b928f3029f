"""Weights & Biases: one run for each lineage of a job, in one group, over all restarts."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import wandb

from holdfast.integrations.logger_run import LoggerRun
from holdfast.session import Session

BLOCK_BYTES = 32768
"""Size of a block in the file of an offline run, which has the log format of LevelDB after a header of 7 bytes."""


class WandbRun(LoggerRun):
    """The W&B run of a session: `log`, and all attributes of `wandb.Run`.

    After a restore, it refers to the run of the new lineage.
    """

    logger = "W&B"
    _seen = 0
    """Last step that an earlier attempt logged."""

    def log(self, data: dict[str, Any], step: int | None = None, **arguments: Any) -> None:
        """Log `data` at `step`, by default the current iteration, `session.iteration + 1`.

        Skips steps that an earlier attempt logged in this run: an exact resume repeats their values.
        """
        step = self._session.iteration + 1 if step is None else step
        if step <= self._seen:
            return
        self._run.log(data, step=step, **arguments)

    def _end(self) -> None:
        self._run.finish()

    def _without_run(self) -> Any:
        self._seen = 0
        return wandb.init(mode="disabled", reinit="create_new")  # not the run that could not be finished

    def _open(self, iteration: int, lineage: int) -> None:
        known, arguments = self._session.logger_runs.get("wandb"), self._arguments
        if known is not None and known[1] != lineage:
            self._run = self._branch(known[0], iteration, lineage)
        else:
            self._run = _init({**arguments, "resume": "allow"} | ({"id": known[0]} if known else {}))
        self._lineage, self._seen = lineage, self._run.starting_step - 1
        if self._run.disabled:
            return
        self._session.logger_runs["wandb"] = (self._run.id, lineage)
        if self._run.offline:  # files of earlier attempts
            folder = Path(self._run.sync_dir)
            files = folder.parent.glob(f"offline-run-*-{self._run.id}/run-*.wandb")
            self._seen = max([self._seen, *(last_step(file) for file in files if file.parent != folder)])
        about = {"job": self._session.job, "url": self._session.url, "lineage": lineage, "iteration": iteration}
        self._run.config.update({"holdfast": about}, allow_val_change=True)
        if self._run.url:
            self._session.notice("info", "logger", f"W&B run {self._run.id}: {self._run.url}")

    def _branch(self, run_id: str, iteration: int, lineage: int) -> Any:
        """Fork the run that the checkpoint names. Where W&B cannot, begin a new run in the same group."""
        arguments = {name: value for name, value in self._arguments.items() if name not in ("id", "resume")}
        mode, reason = arguments.get("mode") or wandb.setup().settings.mode, "W&B is offline"
        if mode not in ("offline", "dryrun", "disabled"):
            try:
                return wandb.init(**arguments, fork_from=f"{run_id}?_step={iteration}")
            except wandb.Error as error:
                reason = f"{error}"
        run = wandb.init(**arguments)
        self._session.notice(
            "info",
            "logger",
            f"lineage {lineage}, from iteration {iteration:,} on, is W&B run {run.id} of group "
            f"{arguments['group']}, because run {run_id} could not be forked: {reason}",
        )
        return run


def _init(arguments: dict[str, Any]) -> Any:
    """Call `wandb.init`; if the service of another process has the run in use, call it again with a new service.

    A process that was started by another one with W&B, as in a sweep, uses that one's service (`WANDB_SERVICE`),
    which keeps the run of a killed process in use forever.
    """
    try:
        return wandb.init(**arguments)
    except Exception as error:  # of a private type
        _, _, started_by = os.environ.get("WANDB_SERVICE", "").partition("-")
        if "is in use" not in str(error) or not started_by or started_by.startswith(f"{os.getpid()}-"):
            raise
    wandb.teardown()
    os.environ.pop("WANDB_SERVICE", None)
    return wandb.init(**arguments)


def last_step(file: Path) -> int:
    """Return the last step in the file of an offline run, which no server knows; 0 if there is none."""
    from wandb.proto.wandb_internal_pb2 import Record  # only offline runs need it

    data, place, record, step = file.read_bytes(), 7, b"", 0
    while place + 7 <= len(data):
        if (left := BLOCK_BYTES - place % BLOCK_BYTES) < 7:  # a header fits into its block
            place += left
            continue
        size, kind = struct.unpack_from("<4xHB", data, place)
        record += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4) and place <= len(data):  # a whole record, or the last part of one
            step, record = max(step, Record.FromString(record).history.step.num), b""
    return step


def init(session: Session, **arguments: Any) -> WandbRun:
    """Begin the W&B run of a job, or continue it after a restart.

    Resumes the session, unless it has resumed: the checkpoint holds the id of the run. After a restore, the run is
    forked at the restored iteration; where W&B cannot do that, a new run begins in the same group.

    Args:
        session: the session. With several ranks, call `session.resume()` on all of them first, and this function
            on rank 0 only.
        **arguments: those of `wandb.init`. `group` is the job's name by default.

    Raises:
        wandb.Error: the run could not be begun.
    """
    return WandbRun(session, {"group": session.job, **arguments})
