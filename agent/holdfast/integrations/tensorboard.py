"""TensorBoard: one log directory for all attempts of a job, without the steps that a restore undid."""

from __future__ import annotations

import os
from typing import Any

from torch.utils import tensorboard

from holdfast.save.run import Run, RunState
from holdfast.session import Session


class SummaryWriter(tensorboard.SummaryWriter):
    """The `SummaryWriter` of torch, which follows a session.

    Resumes the session, unless it has resumed. TensorBoard hides steps after the iteration that training went back
    to. Events are flushed before a checkpoint is durable, so that a killed job leaves no gap.

    Args:
        session: the session. With several ranks, call `session.resume()` on all of them first, and create the
            writer on rank 0 only.
        log_dir: directory of the event files, the same at each start. Default: `runs/<job>`.
        **arguments: further arguments of torch's `SummaryWriter`, except `purge_step`.

    Use `session.iteration + 1` as the step, before `session.step`.
    """

    def __init__(self, session: Session, log_dir: str | os.PathLike[str] | None = None, **arguments: Any) -> None:
        session.resume()
        self._lineage = session.lineage
        log_dir = os.fspath(log_dir) if log_dir is not None else os.path.join("runs", session.job)
        super().__init__(log_dir, purge_step=session.iteration + 1, **arguments)
        if session.url is not None:
            self.add_text("holdfast", f"[{session.job}]({session.url})", session.iteration)
        session.observe(self)
        session.on_restored(self._restored)

    def _restored(self, iteration: int, lineage: int) -> None:
        if lineage != self._lineage:  # otherwise this writer began there
            self._lineage = lineage
            self.close()  # the next event opens a new file, which begins with the step to purge from
            self.purge_step = iteration + 1

    def run_changed(self, run: Run, state: RunState) -> None:
        """Flush before a checkpoint becomes durable; on a background thread."""
        if state is RunState.WRITING:
            self.flush()
