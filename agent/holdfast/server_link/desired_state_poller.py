"""The thread that learns what the server wants of the job: it holds a long poll on the desired state."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from time import monotonic

from holdfast.protocol.messages import Desired
from holdfast.server_link.http_client import AgentClient, Backoff, NoAnswer

log = logging.getLogger("holdfast")

WAIT_SECONDS = 25.0
HASTY_SECONDS = 1.0
"""A long poll that ends sooner without news was not held: asking on at that pace would be a busy loop."""


class DesiredStatePoller:
    """Keeps the newest desired state. Only its own thread changes it, and calls back without any lock.

    A long poll asks for what is newer than a version, so its answer counts only if it is. A plain request asks
    what holds now: its answer is obeyed even when its version is lower, as after the server's database was
    deleted; otherwise the job would wait for a version that may never come. Plain requests are made first, after
    each loss of contact, and when an acknowledgement names another version than the one known here.
    """

    def __init__(self, client: AgentClient, job: str, on_desired: Callable[[Desired], None] | None = None) -> None:
        self._client, self._job, self._on_desired = client, job, on_desired
        self.newest: Desired | None = None
        self._backoff = Backoff()
        self._closing = self._in_long_poll = False
        self._ask_plainly = True
        self._wake, self._asked_once = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="holdfast-poll", daemon=True)

    @property
    def version(self) -> int | None:
        return self.newest.version if self.newest else None

    def start(self) -> None:
        self._thread.start()

    def wait_first(self, timeout_seconds: float) -> Desired | None:
        """The answer to the first request; None when there is none in time."""
        self._asked_once.wait(timeout_seconds)
        return self.newest

    def nudge(self) -> None:
        """The server is there again: do not wait out the back-off."""
        self._wake.set()

    def ask_now(self) -> None:
        """Ask plainly at once, whatever a long poll that is under way would answer."""
        self._ask_plainly = True
        self._wake.set()
        if self._in_long_poll:  # a plain request is left alone: a slow server would never get to answer one
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
            plainly, self._ask_plainly = self._ask_plainly, False
            pause = 0.0
            try:
                if self._ask(plainly=plainly):
                    self._backoff.reset()
                else:
                    pause = HASTY_SECONDS
            except Exception as error:  # keep the thread alive: without it no later order would arrive
                log.debug("asking for the desired state failed", exc_info=not isinstance(error, NoAnswer))
                if not self._ask_plainly:  # else `ask_now` has ended the long poll
                    self._ask_plainly = True
                    at_least = error.retry_seconds if isinstance(error, NoAnswer) else HASTY_SECONDS
                    pause = self._backoff.next_seconds(at_least)
            self._asked_once.set()
            if pause:
                self._wake.wait(pause)
            self._wake.clear()
        self._client.close()

    def _ask(self, *, plainly: bool) -> bool:
        """Whether to ask on at once."""
        if plainly or self.newest is None:
            desired = self._client.desired(self._job, after=None)
            if desired is None:
                raise NoAnswer("it does not say what it wants")
            if self.newest is not None and desired.version < self.newest.version:
                log.warning(
                    "The server went back from version %d to %d of what it wants of this job: its data may have "
                    "been deleted. It is obeyed.",
                    self.newest.version,
                    desired.version,
                )
            if desired != self.newest:
                self._deliver(desired)
            return True
        asked_at = monotonic()
        self._in_long_poll = True
        try:
            newer = self._client.desired(self._job, after=self.newest.version, wait_seconds=WAIT_SECONDS)
        finally:
            self._in_long_poll = False
        if newer is None or newer.version <= self.newest.version:
            return monotonic() - asked_at >= HASTY_SECONDS
        self._deliver(newer)
        return True

    def _deliver(self, desired: Desired) -> None:
        self.newest = desired
        if self._on_desired is None:
            return
        try:
            self._on_desired(desired)
        except Exception:  # a failed callback of the session must not end the conversation
            log.exception("What the server wants could not be passed on to the session")
