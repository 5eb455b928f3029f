"""The thread that long-polls the desired state of a job."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from time import monotonic

from holdfast.protocol.wire import Desired
from holdfast.server_link.http_client import AgentClient, Backoff, RequestFailed

log = logging.getLogger("holdfast")

WAIT_SECONDS = 25.0
HASTY_SECONDS = 1.0
"""A long poll that ends sooner without news is followed by a pause, to avoid a busy loop."""


class DesiredStatePoller:
    """Keeps the newest desired state. Only its own thread changes it, and calls `on_desired` without a lock.

    A long poll waits for a newer version, so that an older answer is ignored. A plain request returns the current
    state, which holds even if its version is lower, as after the server's database was deleted. Plain requests
    are made first, after each loss of contact, and when an acknowledgement names another version.
    """

    def __init__(self, client: AgentClient, job: str, on_desired: Callable[[Desired], None] | None = None) -> None:
        self._client, self._job, self._on_desired = client, job, on_desired
        self.newest: Desired | None = None
        self._backoff = Backoff()
        self._closing = self._in_long_poll = False
        self._plain_next = True
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="holdfast-poll", daemon=True)

    @property
    def version(self) -> int | None:
        return self.newest.version if self.newest else None

    def start(self) -> None:
        self._thread.start()

    def nudge(self) -> None:
        """Retry now instead of waiting out the back-off: the server answers again."""
        self._wake.set()

    def ask_now(self) -> None:
        """Make a plain request now, and end the current long poll."""
        self._plain_next = True
        self._wake.set()
        if self._in_long_poll:  # a plain request goes on: a slow server could otherwise never answer one
            self._client.abort()

    def close(self) -> None:
        self._closing = True
        self._wake.set()
        self._client.shut()

    def join(self, timeout_seconds: float) -> None:
        if self._thread.is_alive():
            self._thread.join(timeout_seconds)

    def _run(self) -> None:
        while not self._closing:
            plain, self._plain_next = self._plain_next, False
            pause = 0.0
            try:
                if self._ask(plain=plain):
                    self._backoff.reset()
                else:
                    pause = HASTY_SECONDS
            except Exception as error:  # keep the thread alive: without it no later order would arrive
                log.debug("polling the desired state failed", exc_info=not isinstance(error, RequestFailed))
                if not self._plain_next:  # otherwise `ask_now` ended the long poll
                    self._plain_next = True
                    at_least = error.retry_seconds if isinstance(error, RequestFailed) else HASTY_SECONDS
                    pause = self._backoff.next_seconds(at_least)
            if pause:
                self._wake.wait(pause)
            self._wake.clear()
        self._client.close()

    def _ask(self, *, plain: bool) -> bool:
        """Make one request. Return whether to make the next one without a pause."""
        if plain or self.newest is None:
            desired = self._client.desired(self._job, after=None)
            if desired is None:
                raise RequestFailed("it returned no desired state")
            if self.newest is not None and desired.version < self.newest.version:
                log.warning(
                    "The desired state went back from version %d to %d: the server's data may have been deleted. "
                    "The older version applies.",
                    self.newest.version,
                    desired.version,
                )
            if desired != self.newest:
                self._deliver(desired)
            return True
        asked_at = monotonic()
        self._in_long_poll = True
        try:
            known = self.newest
            newer = self._client.desired(
                self._job, after=known.version, alert_pins=known.alert_pins, share_number=known.share_number,
                wait_seconds=WAIT_SECONDS,
            )  # fmt: skip
        finally:
            self._in_long_poll = False
        if newer is None or not _is_newer(newer, self.newest):
            return monotonic() - asked_at >= HASTY_SECONDS
        self._deliver(newer)
        return True

    def _deliver(self, desired: Desired) -> None:
        self.newest = desired
        if self._on_desired is None:
            return
        try:
            self._on_desired(desired)
        except Exception:  # keep the thread alive: later changes must still arrive
            log.exception("Passing the desired state to the session failed")


def _is_newer(desired: Desired, known: Desired) -> bool:
    if desired.version != known.version:
        return desired.version > known.version
    return (desired.alert_pins, desired.share_number) != (known.alert_pins, known.share_number)
