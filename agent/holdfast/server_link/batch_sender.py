"""The thread that sends batches of reports, and stores them on disk while no server accepts them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from time import monotonic

from holdfast.protocol.wire import Ack, Event
from holdfast.server_link.event_queue import EventQueue, SealedBatch
from holdfast.server_link.http_client import (
    REQUEST_SECONDS,
    AgentClient,
    AttemptFenced,
    Backoff,
    BatchRejected,
    InvalidToken,
    NotHttpServer,
    RequestFailed,
    TooManyRequests,
)

log = logging.getLogger("holdfast")

BURST_SECONDS = 0.05
"""How long to wait for the rest of a burst of events."""
ANSWERS_BETWEEN_REPORTS, MOST_REPORT_SECONDS = 5, 10.0
SILENCED_SECONDS = 1.0
"""How long the thread may take to abandon a request and remove unsent reports from disk."""
LOST = ("lost", "unauthorized")


class ReportInterval:
    """The time between two reports: longer if the server is slow to answer, so that it can keep up.

    At most half of the time after which the server calls a job silent.
    """

    def __init__(self, flush_seconds: float) -> None:
        self._flush_seconds = flush_seconds
        self._answer_seconds = 0.0

    @property
    def seconds(self) -> float:
        return max(self._flush_seconds, ANSWERS_BETWEEN_REPORTS * self._answer_seconds)

    def note_answer(self, seconds: float | None) -> None:
        """Note how long the server took to acknowledge a batch; `None`: it put the batch off."""
        most = MOST_REPORT_SECONDS / ANSWERS_BETWEEN_REPORTS
        self._answer_seconds += (min(most, most if seconds is None else seconds) - self._answer_seconds) / 4


class BatchSender:
    """Sends the batches of an outbox, and logs when contact with the server is lost or regained."""

    def __init__(
        self,
        client: AgentClient,
        outbox: EventQueue,
        *,
        flush_seconds: float,
        on_ack: Callable[[Ack], None],
        on_contact: Callable[[], None],
        measures: Sequence[Callable[[], Event | None]] = (),
        quiet: bool = False,
    ) -> None:
        self._client, self._outbox = client, outbox
        self._flush_seconds, self._interval = flush_seconds, ReportInterval(flush_seconds)
        self._info, self._warning = (logging.DEBUG,) * 2 if quiet else (logging.INFO, logging.WARNING)
        self._on_ack, self._on_contact, self._measures = on_ack, on_contact, measures
        self._backoff = Backoff()
        self._contact = "unknown"
        self._retry_at = 0.0
        self._samples_at = 0.0
        """When to send samples again: an overloaded server rejects samples, and accepts events."""
        self._close_at: float | None = None
        self._rejection_logged = False
        self.is_fenced = False
        """Whether the server reported that a newer attempt has begun."""
        self._silenced = False
        self._wake, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="holdfast-send", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def flush_soon(self) -> None:
        self._wake.set()

    def silence(self) -> None:
        """Stop sending, and discard what is unsent."""
        self._silenced = True
        self._close_at = monotonic()
        self._wake.set()
        self._closing.set()
        self._client.shut()
        if self._thread.is_alive():
            self._thread.join(SILENCED_SECONDS)

    def close(self, close_at: float, end_at: float) -> None:
        """Send what is left until `close_at`, and store the rest on disk by `end_at`."""
        self._close_at = close_at
        self._wake.set()
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(max(0.0, close_at - monotonic()))
        if self._thread.is_alive():
            self._client.shut()  # ends the current request, so that the thread stores the rest
            self._thread.join(max(0.0, end_at - monotonic()))

    def _run(self) -> None:
        while self._close_at is None:
            self._wake.wait(self._pause())
            # While no server answers, write to disk once a second at most.
            self._closing.wait(max(BURST_SECONDS, self._pause()) if self._contact in LOST else BURST_SECONDS)
            self._wake.clear()
            self._run_safely(self._tick)
        self._run_safely(self._finish)
        self._client.close()

    def _run_safely(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception:  # keep the thread alive: it is not restarted
            log.debug("sending to the server failed", exc_info=True)
            self._retry_at = monotonic() + self._backoff.next_seconds(self._flush_seconds)

    def _pause(self) -> float:
        if self._contact in LOST:
            until_retry = self._retry_at - monotonic()
            return min(self._flush_seconds, until_retry) if until_retry > 0 else self._flush_seconds
        return self._interval.seconds

    def _tick(self) -> None:
        if self.is_fenced or self._silenced:
            return
        if monotonic() < self._retry_at:
            self._outbox.store_events()
            return
        for measure in self._measures:
            if (measured := measure()) is not None:
                self._outbox.event(measured)
        self._send_all()

    def _finish(self) -> None:
        assert self._close_at is not None
        if self._silenced:
            self._outbox.discard_own()
            return
        self._samples_at = 0.0  # also if the server has put samples off: this is the last chance
        # Leave some time for the disk.
        send_until = monotonic() + 0.8 * (self._close_at - monotonic())
        try:
            self._send_all(send_until)
        finally:
            self._outbox.store_all()

    def _send_all(self, until: float | None = None) -> None:
        """Send sealed batches in order, then pending reports, or an empty batch as a heartbeat.

        `until` limits the last call, which sends no heartbeat.
        """
        heartbeat_sent = until is not None
        while self._close_at is None or until is not None:
            limit = REQUEST_SECONDS if until is None else min(REQUEST_SECONDS, until - monotonic())
            if limit <= 0:
                return
            samples = monotonic() >= self._samples_at
            next_batch = self._outbox.first(samples=samples)
            if next_batch is None:
                if heartbeat_sent and not self._outbox.has_pending(full_batch=until is None, samples=samples):
                    return
                self._outbox.seal(samples=samples)
                heartbeat_sent = True
                continue
            if not self._send(*next_batch, limit):
                return

    def _send(self, sealed: SealedBatch, payload: bytes, limit_seconds: float) -> bool:
        """Send a batch. Return whether the server answered, even if it rejected samples for now."""
        sent_at = monotonic()
        try:
            ack = self._client.ingest(payload, sealed.key.sequence, limit_seconds=limit_seconds)
        except BatchRejected as reason:
            if isinstance(reason, AttemptFenced) and self._outbox.owns(sealed):
                self.is_fenced = True
                return False
            self._outbox.acknowledged(sealed)
            self._log_rejection(str(reason))
            self._note_contact()
        except RequestFailed as reason:
            if isinstance(reason, TooManyRequests) and sealed.key.lane == "samples":
                self._interval.note_answer(None)
                self._samples_at = monotonic() + max(reason.retry_seconds, self._interval.seconds)
                self._note_contact()
                return True
            self._note_failure(reason)
            self._outbox.store_events()
            return False
        else:
            self._interval.note_answer(monotonic() - sent_at)
            self._outbox.acknowledged(sealed)
            self._note_contact()
            self._on_ack(ack)
        return True

    def _note_contact(self) -> None:
        self._backoff.reset()
        self._retry_at = 0.0
        before, self._contact = self._contact, "held"
        if before in LOST:
            log.log(self._info, "%s answers again; sending stored reports", self._client.server)
            self._on_contact()

    def _note_failure(self, reason: RequestFailed) -> None:
        self._retry_at = monotonic() + self._backoff.next_seconds(reason.retry_seconds)
        before = self._contact
        self._contact = "unauthorized" if isinstance(reason, InvalidToken) else "lost"
        if before == self._contact:
            return
        # one that has answered before may close a connection as well, when it stops or is overloaded
        is_other = isinstance(reason, NotHttpServer) and before == "unknown"
        if isinstance(reason, InvalidToken):
            log.log(
                self._warning,
                "%s rejects this job's token (%s): %s. Training continues; reports are stored.",
                self._client.server,
                reason,
                reason.remedy,
            )
        else:
            log.log(
                self._warning,
                "%s does not accept reports (%s). Training continues; reports are stored and sent later.",
                self._client.server,
                f"{reason}; this is not a Holdfast server" if is_other else reason,
            )

    def _log_rejection(self, reason: str) -> None:
        if not self._rejection_logged:
            self._rejection_logged = True
            log.log(
                self._warning,
                "%s rejected a batch of reports, which is dropped: %s",
                self._client.server,
                reason,
            )
