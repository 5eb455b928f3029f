"""`ServerConnection`: what the session holds, and how sender, poller and outbox are joined."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from time import monotonic

from holdfast.protocol.messages import Ack, Desired, Event
from holdfast.server_link.batch_sender import BatchSender
from holdfast.server_link.desired_state_poller import DesiredStatePoller
from holdfast.server_link.event_queue import EventQueue, Measured
from holdfast.server_link.http_client import AgentClient
from holdfast.server_link.spool import LIMIT_BYTES, Spool


class ServerConnection:
    """The conversation of one rank of one attempt with one server.

    Args:
        server: its address; ValueError when it is none.
        token: the shared secret, where the server asks for one.
        uid: random name of the attempt. (job, uid, rank, sequence) names a batch for ever.
        spool: a directory for what no server takes; None keeps it in memory, within bounds.
        flush_seconds: between two batches. An empty one says that the job is alive.
        on_desired: called by a background thread with each new desired state.
        spool_bytes: most bytes that the spool may hold.
        aside: of a rank beside rank 0: it sends, hears nothing of what is wanted, and leaves the log to rank 0.
    """

    heard = True

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
        spool_bytes: int = LIMIT_BYTES,
        aside: bool = False,
    ) -> None:
        self._job, self._aside = job, aside
        kept = Spool(spool, limit_bytes=spool_bytes) if spool is not None else None
        self._outbox = EventQueue(job, uid, attempt, rank, kept)
        self._poller = DesiredStatePoller(AgentClient(server, token), job, on_desired)
        self._client = AgentClient(server, token)
        self._sender = BatchSender(
            self._client,
            self._outbox,
            flush_seconds=flush_seconds,
            on_ack=self._acknowledged,
            on_contact=self._poller.nudge,
            quiet=aside,
        )
        self._started = False
        self._silent, self._pid = False, os.getpid()

    @property
    def page(self) -> str:
        """The address of the job's page."""
        return f"{self._client.server}/jobs/{self._job}"

    def start(self) -> None:
        self._started = True
        self._sender.start()
        if not self._aside:
            self._poller.start()

    def first_desired(self, timeout_seconds: float) -> Desired | None:
        """What is wanted before training starts, of a link that is not to be started afterwards.

        None when no server says so in time. Blocks, never raises.
        """
        self._poller.start()
        first = self._poller.wait_first(timeout_seconds)
        self._poller.close()
        return first

    def sample(self, measured: Measured, metrics: dict[str, float]) -> None:
        """One iteration's figures. Takes a microsecond or two and no lock. Neither may be changed later."""
        if not self._is_silent:
            self._outbox.sample((measured, metrics))

    def event(self, event: Event) -> None:
        """Something that happened; sent at once, and kept on disk until a server has it."""
        if not self._is_silent:
            self._outbox.event(event)
            self._sender.flush_soon()

    @property
    def desired(self) -> Desired | None:
        """The newest that is known."""
        return self._poller.newest

    @property
    def fenced(self) -> bool:
        """The server says that a newer attempt of the job has begun."""
        return self._sender.fenced

    def silence(self) -> None:
        """Say and hear nothing any more, and leave nothing to be said later."""
        if self._is_silent:
            return
        self._silent = True
        self._poller.close()
        self._sender.silence()

    @property
    def refused_batches(self) -> int:
        """Batches that the server would not have, and that were set aside."""
        return self._outbox.refused_batches

    def close(self, deadline_seconds: float = 5.0) -> None:
        """Send what is left, else keep it on disk for the next attempt to send."""
        if self._is_silent or not self._started:
            return
        self._silent = True
        close_at = monotonic() + deadline_seconds
        self._poller.close()
        self._sender.close(close_at - 0.1 * deadline_seconds)
        # Does nothing but for a sender that is stuck.
        self._outbox.park_all(close_at - monotonic())
        self._poller.join(max(0.0, close_at - monotonic()))

    @property
    def _is_silent(self) -> bool:
        """Also in a forked child, a data worker as a rule: it has neither the threads nor the right to report."""
        return self._silent or os.getpid() != self._pid

    def _acknowledged(self, ack: Ack) -> None:
        """Also learn of a change behind a proxy that cuts long polls."""
        if not self._aside and self._poller.version not in (None, ack.version):
            self._poller.ask_now()


class OfflineConnection:
    """The methods of `ServerConnection`, doing nothing: what a session talks to when there is no server."""

    heard = False
    fenced = False
    desired: Desired | None = None
    page: str | None = None

    def start(self) -> None: ...

    def first_desired(self, timeout_seconds: float) -> Desired | None:
        return None

    def sample(self, measured: Measured, metrics: dict[str, float]) -> None: ...

    def event(self, event: Event) -> None: ...

    def silence(self) -> None: ...

    def close(self, deadline_seconds: float = 5.0) -> None: ...
