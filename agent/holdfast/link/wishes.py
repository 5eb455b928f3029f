"""The newest desired state, and the rule for which of two is the newer."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from holdfast.protocol import Desired

log = logging.getLogger("holdfast")


class Wishes:
    """Keeps what is wanted of the job, from answers that two threads bring in any order.

    A long poll asks for what is newer than a version, so its answer counts only if it is. A plain request asks
    what holds now: its answer is the server's word and is obeyed even when its version is lower, as after the
    server's database was deleted; otherwise the job would deaf-mutely wait for a version that may never come.
    So that a delayed plain answer cannot undo a newer one, it counts only if nothing else was delivered since
    it was asked for (`moment`). Plain requests are made after each loss of contact and whenever an
    acknowledgement names another version than the one known here.
    """

    def __init__(self, on_desired: Callable[[Desired], None] | None) -> None:
        self._on_desired = on_desired
        self._newest: Desired | None = None
        self._deliveries = 0
        self._lock = threading.Lock()

    @property
    def newest(self) -> Desired | None:
        return self._newest

    @property
    def version(self) -> int | None:
        return self._newest.version if self._newest else None

    @property
    def moment(self) -> int:
        """To be noted before a plain request and handed in with its answer."""
        return self._deliveries

    def polled(self, desired: Desired) -> bool:
        """The answer to a long poll. Whether it brought something new."""
        with self._lock:
            if self._newest is not None and desired.version <= self._newest.version:
                return False
            self._deliver(desired)
            return True

    def fetched(self, desired: Desired, moment: int) -> None:
        """The answer to a plain request that was made at `moment`."""
        with self._lock:
            known = self._newest
            if known is not None and (desired == known or moment != self._deliveries):
                return
            if known is not None and desired.version < known.version:
                log.warning(
                    "The server went back from version %d to %d of what it wants of this job: its data may have "
                    "been deleted. It is obeyed.",
                    known.version,
                    desired.version,
                )
            self._deliver(desired)

    def _deliver(self, desired: Desired) -> None:
        self._newest = desired
        self._deliveries += 1
        if self._on_desired is None:
            return
        try:
            self._on_desired(desired)
        except Exception:  # the session's own callback: the conversation must go on whatever it does
            log.exception("What the server wants could not be passed on to the session")
