"""The supervisor's connection to the server: it reports notices and waits for restore requests.

Imported on demand, never while a trainer starts: connections take memory.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Literal

import msgspec

from holdfast.protocol.wire import (
    RESCUE_RANK,
    SUPERVISOR_RANK,
    Batch,
    Checkpoint,
    Desired,
    Event,
    Notice,
    RestoreOrder,
    SupervisorReport,
)
from holdfast.save.draft import Draft
from holdfast.server_link.desired_state_poller import DesiredStatePoller
from holdfast.server_link.http_client import AgentClient, Backoff, send_once
from holdfast.system import processes, supervisor_channel, supervisor_files
from holdfast.system.supervisor_channel import PublishedAttempt

REPORT_SECONDS = 10.0
RESCUE_SEQUENCE = 1 << 40
"""The sequence number of a rescue's report, beyond those of the attempt's own reports."""
MAX_NOTICE_CHARACTERS = 4000
"""The longest notice that the server accepts."""
REPEAT_SECONDS = 30.0
"""Time between two reports of a restart whose start has not begun an attempt yet: it may import for minutes."""


class SupervisorReporter:
    """Reports to the server on behalf of the attempt that the supervisor watched."""

    def __init__(self, rank: int = SUPERVISOR_RANK, first_sequence: int = 0) -> None:
        self._rank, self._first_sequence = rank, first_sequence
        self._sequences: dict[str, int] = {}
        self._sending = threading.Lock()  # the server expects the batches of a rank one after another

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
        with self._sending:
            sequence = self._sequences.get(attempt.uid, self._first_sequence)
            self._sequences[attempt.uid] = sequence + 1
            batch = Batch(
                job=attempt.job, uid=attempt.uid, attempt=attempt.attempt, rank=self._rank, sequence=sequence,
                sent_at=time.time(), iteration=iteration, lineage=attempt.lineage, events=list(events),
            )  # fmt: skip
            return send_once(attempt.server, os.environ.get("HOLDFAST_TOKEN"), batch, REPORT_SECONDS)


class StateReporter:
    """Reports what the supervisor does, from a thread: a server that does not answer must not delay a restart.

    Only the newest report counts. It is sent until the server accepts it. A restart is reported again until the
    next start has published its attempt, so that the server can tell a slow start from a dead supervisor.
    """

    def __init__(self, folder: Path, reporter: SupervisorReporter) -> None:
        self._folder, self._reporter = folder, reporter
        self._changed = threading.Condition()
        self._newest: tuple[PublishedAttempt, int, SupervisorReport] | None = None
        """The attempt that ended, the iteration that it reached, and the report."""
        self._starts_at = 0.0
        self._is_sent = True
        threading.Thread(target=self._run, name="holdfast-state", daemon=True).start()

    def report(self, attempt: PublishedAttempt, iteration: int, report: SupervisorReport) -> None:
        with self._changed:
            self._newest, self._is_sent = (attempt, iteration, report), False
            self._starts_at = time.monotonic() + report.delay_seconds
            self._changed.notify_all()

    def settle(self, seconds: float) -> None:
        """Wait until the server has accepted the newest report, for a limited time."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_sent, seconds)

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, processes.STOP_SIGNALS)  # they are for the main thread
        backoff, wait_seconds = Backoff(), None
        sent: tuple[PublishedAttempt, int, SupervisorReport] | None = None
        while True:
            with self._changed:
                if self._newest is sent:
                    self._changed.wait(wait_seconds)
                newest = self._newest
            if newest is None or (newest is sent and self._has_begun(newest[0])):
                wait_seconds = None
                continue
            if newest is not sent:
                backoff.reset()
            sent, is_accepted = newest, self._send(*newest)
            if not is_accepted:
                wait_seconds = min(backoff.next_seconds(1.0), REPEAT_SECONDS)
                continue
            wait_seconds = REPEAT_SECONDS if newest[2].state == "restarting" else None
            with self._changed:
                self._is_sent = self._newest is newest
                self._changed.notify_all()

    def _send(self, attempt: PublishedAttempt, iteration: int, report: SupervisorReport) -> bool:
        delay = max(0.0, self._starts_at - time.monotonic())
        report = msgspec.structs.replace(report, at=time.time(), delay_seconds=delay)
        try:
            return self._reporter.send(attempt, iteration, report)
        except ValueError as error:  # the address of the server is not valid
            supervisor_channel.logger.debug("the supervisor cannot report: %s", error)
            return True

    def _has_begun(self, ended: PublishedAttempt) -> bool:
        """Return whether the start after an attempt that ended has begun one of the same job."""
        attempt = supervisor_files.published_attempt(self._folder)
        return attempt is not None and attempt.job == ended.job and attempt.uid != ended.uid


def report_rescue(attempt: PublishedAttempt, draft: Draft, payload_bytes: int, message: str) -> None:
    """Report a checkpoint that was saved from memory after its attempt died. Never raises."""
    SupervisorReporter(RESCUE_RANK, RESCUE_SEQUENCE).send(
        attempt,
        draft.iteration,
        Checkpoint(
            at=time.time(), id=draft.id, iteration=draft.iteration, lineage=draft.lineage,
            kind=draft.kind,
            state="durable", payload_bytes=payload_bytes, durable_iteration=draft.iteration,
            snapshot_started_at=draft.created_at, snapshot_seconds=draft.timings.get("snapshot_seconds"),
            stall_seconds=draft.timings.get("stall_seconds"),
        ),
        Notice(
            at=time.time(), iteration=draft.iteration, lineage=draft.lineage, level="warning", code="rescue",
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
