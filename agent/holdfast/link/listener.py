"""The thread that holds the long poll."""

from __future__ import annotations

import logging
import threading
from time import monotonic

from holdfast.link.backoff import Backoff
from holdfast.link.client import Client, NoAnswer
from holdfast.link.wishes import Wishes

log = logging.getLogger("holdfast")

WAIT_SECONDS = 25.0
HASTY_SECONDS = 1.0
"""A long poll that ends sooner without news was not held: asking on at that pace would be a busy loop."""


class Listener:
    def __init__(self, client: Client, job: str, wishes: Wishes) -> None:
        self._client, self._job, self._wishes = client, job, wishes
        self._backoff = Backoff()
        self._closing = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="holdfast-listener", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def nudge(self) -> None:
        """The server is there again: no need to wait out the back-off."""
        self._wake.set()

    def close(self) -> None:
        self._closing = True
        self._wake.set()
        self._client.shut()

    def join(self, timeout_seconds: float) -> None:
        if self._thread.is_alive():
            self._thread.join(timeout_seconds)

    def _run(self) -> None:
        after: int | None = None
        while not self._closing:
            pause = 0.0
            try:
                after, held = self._ask(after)
                if held:
                    self._backoff.reset()
                else:
                    pause = HASTY_SECONDS
            except NoAnswer as reason:
                after, pause = None, self._backoff.next_seconds(reason.retry_seconds)
            except Exception:  # a thread's edge: ended by what nobody thought of, it would stay ended
                log.debug("asking for the desired state failed", exc_info=True)
                after, pause = None, self._backoff.next_seconds(HASTY_SECONDS)
            if pause:
                self._wake.wait(pause)
            self._wake.clear()
        self._client.close()

    def _ask(self, after: int | None) -> tuple[int | None, bool]:
        """The version to ask on from, and whether that may be done at once."""
        asked_at, moment = monotonic(), self._wishes.moment
        desired = self._client.desired(
            self._job, after=after, wait_seconds=WAIT_SECONDS if after is not None else 0
        )
        if after is None:
            if desired is None:
                raise NoAnswer("it does not say what it wants")
            self._wishes.fetched(desired, moment)
            return self._wishes.version, True
        news = desired is not None and self._wishes.polled(desired)
        return self._wishes.version, news or monotonic() - asked_at >= HASTY_SECONDS
