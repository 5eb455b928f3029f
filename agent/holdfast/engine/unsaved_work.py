"""Messages about work that is in no checkpoint: of an attempt that ends, or that another one has replaced."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from dataclasses import dataclass

from holdfast.distributed.ranks import Ranks
from holdfast.engine.training import Training
from holdfast.protocol.ids import parse_checkpoint_id
from holdfast.save.history import History
from holdfast.store import Attempt, Ending, Store
from holdfast.store.records import newest_attempt
from holdfast.system import process_facts, supervisor_channel
from holdfast.telemetry.reporter import Reporter

logger = logging.getLogger("holdfast")

UNCOUNTED_UPDATES = 1000
"""Number of optimizer steps without any `session.step` that is reported."""


@dataclass(slots=True)
class UnsavedWork:
    """Logs on rank 0. For the training thread."""

    training: Training
    history: History
    reporter: Reporter
    ranks: Ranks
    _is_replaced: bool = False
    _is_call_missed: bool = False
    """The first updates ran without a call of `session.step`, which was reported."""

    @property
    def _kept_iteration(self) -> int:
        head = self.history.head
        return parse_checkpoint_id(head)[0] if head is not None else 0

    def report_no_final(self, *, requested: bool) -> None:
        """Log why a loop that ended within an iteration gets no final checkpoint.

        Model and random state may be those of the middle of an iteration, from which no script can continue.
        """
        if not self.ranks.leads or self._is_replaced:
            return
        is_lost = self.reporter.position.iteration > self._kept_iteration
        updates, batches = self.training.unsaved_updates, self.training.unsaved_batches
        if updates:
            what, remedy = "optimizer.step() ran", "call it after the last update"
        else:
            what = "1 batch was drawn" if batches == 1 else f"{batches:,} batches were drawn"
            remedy = (
                "if gradients are accumulated, apply those of the last batches and call session.step() once more, "
                "or use a number of batches that divides; otherwise, end the loop before it draws a batch"
            )
        logger.log(
            logging.WARNING if is_lost or updates or requested else logging.INFO,
            "%s: %s after the last session.step(), so no final checkpoint is taken%s: %s",
            *(self.history.job, what),
            *(", nor the one that was requested" if requested else "", remedy),
        )

    def report_unsaved(self) -> None:
        """Log which iterations are in no checkpoint."""
        here, kept = self.reporter.position.iteration, self._kept_iteration
        if here > kept and self.ranks.leads and not self._is_replaced:  # another process decides what is kept
            where = f"resumes from iteration {kept:,}" if kept else "starts at iteration 0"
            logger.warning(
                "%s: the iterations after %s are in no checkpoint: the next attempt %s",
                *(self.history.job, f"{kept:,}", where),
            )

    def report_replaced(self) -> None:
        """Report that another process has started the job, so that this attempt saves nothing from now on."""
        self._is_replaced = True
        if self.ranks.leads:
            history = self.history
            what = describe_replacement(history.store, history.job, history.attempt)
            self.reporter.notice("error", "replaced", what)

    def report_first_updates(self) -> None:
        """Warn once, before the optimizer step of that number, that the loop has not called `step` yet."""
        if self._is_call_missed or not self.ranks.leads:
            return
        self._is_call_missed = True
        logger.warning(
            "%s: optimizer.step() ran %d times, but session.step() was not called: no checkpoint is taken until "
            "it is. Call it at the end of each iteration",
            *(self.history.job, UNCOUNTED_UPDATES),
        )

    def report_uncounted(self) -> None:
        """Warn about a loop that has ended without ever calling `step`."""
        if self.training.updates and not self.training.trained and self.ranks.leads:
            logger.warning(
                "%s: optimizer.step() ran, but session.step() was never called, so no checkpoint was taken: call "
                "it at the end of each iteration",
                self.history.job,
            )


def describe_replacement(store: Store, job: str, attempt: int) -> str:
    """Say which attempt has replaced `attempt`, as far as the store can be read, and what to do."""
    other = ""
    with contextlib.suppress(OSError):
        newest = newest_attempt(store, job)
        if newest is not None and newest.number > attempt:
            other = f" (attempt {newest.number}, process {newest.pid} on {newest.host})"
    if supervisor_channel.is_supervised():
        follows = (
            "This one saves nothing from now on, and ends. If it is a different training, give it another job name"
        )
    else:
        follows = "This one saves nothing from now on: stop it, or give it another job name"
    return f"another process has started this job{other}. {follows}"


def describe_running_predecessor(store: Store, job: str, attempt: int) -> str | None:
    """Describe the attempt before `attempt` if it has not ended and its process runs on this machine."""
    if attempt < 2:
        return None
    try:
        before = next((each for each in store.records(job, Attempt, attempt - 1) if each.number < attempt), None)
        if before is None or before.host != socket.gethostname() or before.pid == os.getpid():
            return None
        if not process_facts.has_run_since(before.pid, before.started_at):
            return None
        if any(each.attempt == before.number for each in store.records(job, Ending, before.number)):
            return None
    except OSError:
        return None
    return (
        f"attempt {before.number} (process {before.pid} on this machine) was still running and can no longer "
        "save. If it is a different training, give it another job name"
    )
