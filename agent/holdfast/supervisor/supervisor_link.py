"""The supervisor's connection to the server: it reports notices and waits for restore requests.

Imported on demand, never while a trainer starts: connections take memory.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from typing import Literal

from holdfast.persist.task import Task
from holdfast.protocol.messages import (
    RESCUE_RANK,
    SUPERVISOR_RANK,
    Batch,
    Checkpoint,
    Desired,
    Event,
    Notice,
    RestoreOrder,
)
from holdfast.server_link.desired_state_poller import DesiredStatePoller
from holdfast.server_link.http_client import AgentClient, send_once
from holdfast.system.supervisor_channel import PublishedAttempt

REPORT_SECONDS = 10.0
RESCUE_SEQUENCE = 1 << 40
"""The sequence number of a rescue's report, beyond those of the attempt's own reports."""
MAX_NOTICE_CHARACTERS = 4000
"""The longest notice that the server accepts."""


class SupervisorReporter:
    """Reports to the server on behalf of the attempt that the supervisor watched."""

    def __init__(self, rank: int = SUPERVISOR_RANK, first_sequence: int = 0) -> None:
        self._rank, self._first_sequence = rank, first_sequence
        self._sequences: dict[str, int] = {}

    def notify(
        self,
        attempt: PublishedAttempt,
        iteration: int,
        level: Literal["info", "warning", "error"],
        code: str,
        *messages: str,
    ) -> bool:
        """Report notices. Return whether the server accepted them. Never raises."""
        at = time.time()
        notices = (
            Notice(at=at, iteration=iteration, lineage=attempt.lineage, level=level, code=code, message=each)
            for each in (message[:MAX_NOTICE_CHARACTERS] for message in messages)
        )
        return self.send(attempt, iteration, *notices)

    def send(self, attempt: PublishedAttempt, iteration: int, *events: Event) -> bool:
        """Report events. Return whether the server accepted them. Never raises."""
        if not attempt.server:
            return False
        sequence = self._sequences.get(attempt.uid, self._first_sequence)
        self._sequences[attempt.uid] = sequence + 1
        batch = Batch(
            job=attempt.job, uid=attempt.uid, attempt=attempt.attempt, rank=self._rank, sequence=sequence,
            sent_at=time.time(), iteration=iteration, lineage=attempt.lineage, events=list(events),
        )  # fmt: skip
        return send_once(attempt.server, os.environ.get("HOLDFAST_TOKEN"), batch, REPORT_SECONDS)


def report_rescue(attempt: PublishedAttempt, task: Task, payload_bytes: int, message: str) -> None:
    """Report a checkpoint that was saved from memory after its attempt died. Never raises."""
    SupervisorReporter(RESCUE_RANK, RESCUE_SEQUENCE).send(
        attempt,
        task.iteration,
        Checkpoint(
            at=time.time(), id=task.id, iteration=task.iteration, lineage=task.lineage,
            kind=task.kind,
            state="durable", payload_bytes=payload_bytes, durable_iteration=task.iteration,
            snapshot_started_at=task.created_at, snapshot_seconds=task.timings.get("snapshot_seconds"),
            stall_seconds=task.timings.get("stall_seconds"),
        ),
        Notice(
            at=time.time(), iteration=task.iteration, lineage=task.lineage, level="warning", code="rescue",
            message=message,
        ),
    )  # fmt: skip


class RestoreRequestWaiter:
    """Waits for a restore request for a job that is not running.

    Args:
        attempt: the job's last attempt; ValueError if its server's address is not valid.
        wake: called by a background thread when a request arrives.
        ignored: ids of requests that the supervisor has made enough starts for.
    """

    def __init__(self, attempt: PublishedAttempt, wake: Callable[[], None], ignored: Collection[str]) -> None:
        assert attempt.server is not None
        self._wake, self._ignored = wake, ignored
        self.order: RestoreOrder | None = None
        """The open request, if there is one."""
        client = AgentClient(attempt.server, os.environ.get("HOLDFAST_TOKEN"))
        self._poller = DesiredStatePoller(client, attempt.job, self._on_desired)
        self._poller.start()

    def close(self) -> None:
        self._poller.close()
        self._poller.join(REPORT_SECONDS)

    def _on_desired(self, desired: Desired) -> None:
        order = desired.restore
        self.order = None if order is None or order.id in self._ignored else order
        if self.order is not None:
            self._wake()
