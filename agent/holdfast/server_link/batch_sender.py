"""The thread that sends batches, and keeps them where nothing is lost while no server takes them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from time import monotonic

from holdfast.protocol.messages import Ack
from holdfast.server_link.event_queue import EventQueue, Sealed
from holdfast.server_link.http_client import (
    REQUEST_SECONDS,
    AgentClient,
    Backoff,
    Later,
    NoAnswer,
    NotAllowed,
    NotHttp,
    Refused,
    Superseded,
)

log = logging.getLogger("holdfast")

BURST_SECONDS = 0.05
"""Events come in bursts; so long is waited for the rest of one."""
SILENCED_SECONDS = 1.0
"""To give up what it is at, and remove what it has kept."""
LOST = ("lost", "locked out")


class BatchSender:
    """Contact is unknown, held, lost, or lost for want of a valid token; a line is logged when it changes."""

    def __init__(
        self,
        client: AgentClient,
        outbox: EventQueue,
        *,
        flush_seconds: float,
        on_ack: Callable[[Ack], None],
        on_contact: Callable[[], None],
        quiet: bool = False,
    ) -> None:
        self._client, self._outbox = client, outbox
        self._flush_seconds = flush_seconds
        self._worth_telling, self._worth_a_warning = (
            (logging.DEBUG, logging.DEBUG) if quiet else (logging.INFO, logging.WARNING)
        )
        self._on_ack, self._on_contact = on_ack, on_contact
        self._backoff = Backoff()
        self._contact = "unknown"
        self._retry_at = 0.0
        self._samples_at = 0.0
        """When samples are to be sent again: a server with too much to store refuses them, and nothing else."""
        self._samples_backoff = Backoff()
        self._close_at: float | None = None
        self._refusal_logged = False
        self.fenced = False
        """The server says that a newer attempt has begun."""
        self._silenced = False
        self._wake, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="holdfast-send", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def flush_soon(self) -> None:
        self._wake.set()

    def silence(self) -> None:
        """Send nothing any more, and keep nothing to be sent later."""
        self._silenced = True
        self._close_at = monotonic()
        self._wake.set()
        self._closing.set()
        self._client.shut()
        if self._thread.is_alive():
            self._thread.join(SILENCED_SECONDS)

    def close(self, close_at: float) -> None:
        """Send what is left until `close_at`, and keep the rest on disk; the thread may be stuck in either."""
        self._close_at = close_at
        self._wake.set()
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(max(0.0, close_at - monotonic()))
        if self._thread.is_alive():
            self._client.shut()

    def _run(self) -> None:
        while self._close_at is None:
            self._wake.wait(self._pause())
            # While nobody answers, one write to disk for all events of a second is enough.
            self._closing.wait(max(BURST_SECONDS, self._pause()) if self._contact in LOST else BURST_SECONDS)
            self._wake.clear()
            self._guarded(self._tick)
        self._guarded(self._finish)
        self._client.close()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception:  # a thread's edge: ended by what nobody thought of, it would stay ended
            log.debug("sending to the server failed", exc_info=True)
            self._retry_at = monotonic() + self._backoff.next_seconds(self._flush_seconds)

    def _pause(self) -> float:
        until_retry = self._retry_at - monotonic()
        return min(self._flush_seconds, until_retry) if until_retry > 0 else self._flush_seconds

    def _tick(self) -> None:
        if self.fenced or self._silenced:
            return
        if monotonic() < self._retry_at:
            self._outbox.park()
            return
        self._send_all()

    def _finish(self) -> None:
        assert self._close_at is not None
        if self._silenced:
            self._outbox.forget()
            return
        # Leave a part of the time for the disk.
        send_until = monotonic() + 0.8 * (self._close_at - monotonic())
        self._send_all(send_until)
        self._outbox.park_all(self._close_at - monotonic())

    def _send_all(self, until: float | None = None) -> None:
        """All sealed batches in order, then what waits; at least one batch, if only an empty one, a heartbeat.

        With a time limit it is the last call, and no heartbeat.
        """
        beaten = until is not None
        while self._close_at is None or until is not None:
            limit = REQUEST_SECONDS if until is None else min(REQUEST_SECONDS, until - monotonic())
            if limit <= 0:
                return
            samples = monotonic() >= self._samples_at
            next_batch = self._outbox.first(samples=samples)
            if next_batch is None:
                if beaten and not self._outbox.waiting(at_least_a_batch=until is None, samples=samples):
                    return
                self._outbox.seal(samples=samples)
                beaten = True
                continue
            if not self._send(*next_batch, limit):
                return

    def _send(self, sealed: Sealed, payload: bytes, limit_seconds: float) -> bool:
        """Whether a server answered, be it that it takes no samples now."""
        try:
            ack = self._client.ingest(payload, sealed.key.sequence, limit_seconds=limit_seconds)
        except Refused as reason:
            if isinstance(reason, Superseded) and self._outbox.owns(sealed):
                self.fenced = True
                return False
            self._outbox.refused(sealed, payload)
            self._log_refusal(str(reason))
            self._held()
        except NoAnswer as reason:
            if isinstance(reason, Later) and sealed.key.lane == "samples":
                self._samples_at = monotonic() + self._samples_backoff.next_seconds(reason.retry_seconds)
                self._held()
                return True
            self._lost(reason)
            self._outbox.park()
            return False
        else:
            self._outbox.acknowledged(sealed)
            if sealed.key.lane == "samples":
                self._samples_backoff.reset()
            self._held()
            self._on_ack(ack)
        return True

    def _held(self) -> None:
        self._backoff.reset()
        self._retry_at = 0.0
        before, self._contact = self._contact, "held"
        if before in LOST:
            log.log(
                self._worth_telling, "%s answers again; reports kept meanwhile are being sent", self._client.server
            )
            self._on_contact()

    def _lost(self, reason: NoAnswer) -> None:
        self._retry_at = monotonic() + self._backoff.next_seconds(reason.retry_seconds)
        before = self._contact
        self._contact = "locked out" if isinstance(reason, NotAllowed) else "lost"
        if before == self._contact:
            return
        if isinstance(reason, NotAllowed):
            log.log(
                self._worth_a_warning,
                "%s does not accept this job's token (%s): %s. Training goes on; reports are kept.",
                self._client.server,
                reason,
                reason.way_out,
            )
        else:
            log.log(
                self._worth_a_warning,
                "%s does not take reports (%s). Training goes on; reports are kept and sent when it answers.",
                self._client.server,
                f"{reason}; a Holdfast server would" if isinstance(reason, NotHttp) else reason,
            )

    def _log_refusal(self, reason: str) -> None:
        if not self._refusal_logged:
            self._refusal_logged = True
            log.log(
                self._worth_a_warning,
                "%s refused a batch of reports, which is set aside: %s",
                self._client.server,
                reason,
            )
