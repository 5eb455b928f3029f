"""The connection of a session to the server: its sender, poller and queue."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic

from holdfast.protocol.wire import Ack, Desired, Event
from holdfast.server_link.batch_sender import BatchSender
from holdfast.server_link.desired_state_poller import DesiredStatePoller
from holdfast.server_link.event_queue import EventQueue, IterationFigures
from holdfast.server_link.http_client import AgentClient
from holdfast.server_link.spool import Spool


class ServerConnection:
    """The connection of one rank of one attempt to a server.

    Args:
        server: address of the server; ValueError if it is not valid.
        token: access key or shared secret, if the server requires one.
        uid: random name of the attempt. (job, uid, rank, lane, sequence) identifies a batch.
        spool: directory for reports that no server accepts; `None` keeps them in memory, within bounds.
        flush_seconds: time between two batches. An empty one is a heartbeat.
        on_desired: called by a background thread with each new desired state.
        measures: called by the sender's thread before it sends; return more events to send. They must not raise.
        send_only: do not poll the desired state, and log at debug level; for all ranks but rank 0.
    """

    def __init__(
        self,
        *,
        server: str,
        token: str | None,
        job: str,
        uid: str,
        attempt: int,
        rank: int,
        spool: Path | None,
        flush_seconds: float = 1.0,
        on_desired: Callable[[Desired], None] | None = None,
        measures: Sequence[Callable[[], Event | None]] = (),
        send_only: bool = False,
    ) -> None:
        self._job, self._send_only = job, send_only
        self._outbox = EventQueue(job, uid, attempt, rank, Spool(spool) if spool is not None else None)
        self._poller = DesiredStatePoller(AgentClient(server, token), job, on_desired)
        self._client = AgentClient(server, token)
        self._sender = BatchSender(
            self._client,
            self._outbox,
            flush_seconds=flush_seconds,
            on_ack=self._acknowledged,
            on_contact=self._poller.nudge,
            measures=measures,
            quiet=send_only,
        )
        self._started = False
        self._silent, self._pid = False, os.getpid()
        self.answered_at = monotonic()
        """When the server last acknowledged a batch, as `time.monotonic` counts."""

    @property
    def page(self) -> str:
        """Address of the job's page, without credentials."""
        return f"{self._client.server}/jobs/{self._job}"

    def start(self) -> None:
        self._started = True
        self._sender.start()
        if not self._send_only:
            self._poller.start()

    def sample(self, figures: IterationFigures, metrics: dict[str, float]) -> None:
        """Report an iteration. Takes about a microsecond and no lock. Do not change the arguments afterwards."""
        if not self._is_silent:
            self._outbox.sample((figures, metrics))

    def event(self, event: Event) -> None:
        """Report an event: it is sent at once, and stored on disk if no server accepts it."""
        if not self._is_silent:
            self._outbox.event(event)
            self._sender.flush_soon()

    @property
    def is_fenced(self) -> bool:
        """Whether the server reported that a newer attempt of the job has begun."""
        return self._sender.is_fenced

    def silence(self) -> None:
        """Stop sending and polling, and discard unsent reports."""
        if self._is_silent:
            return
        self._silent = True
        self._poller.close()
        self._sender.silence()

    def close(self, deadline_seconds: float = 5.0) -> None:
        """Send what is left, or store it on disk for the next attempt to send."""
        if self._is_silent or not self._started:
            return
        self._silent = True
        close_at = monotonic() + deadline_seconds
        self._poller.close()
        self._sender.close(close_at - 0.1 * deadline_seconds, close_at)
        self._poller.join(max(0.0, close_at - monotonic()))

    @property
    def _is_silent(self) -> bool:
        """Whether nothing is to be reported: after closing, or in a forked child such as a data worker."""
        return self._silent or os.getpid() != self._pid

    def _acknowledged(self, ack: Ack) -> None:
        """Poll if the version changed: a proxy may cut long polls."""
        self.answered_at = monotonic()
        if not self._send_only and self._poller.version not in (None, ack.version):
            self._poller.ask_now()
