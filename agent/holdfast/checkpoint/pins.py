"""Checkpoints that people keep: as the server says, and as the store has it noted for when there is no server."""

from __future__ import annotations

import logging
import threading
import time

from holdfast.errors import Fenced
from holdfast.store import Pins, Store, newest_pins
from holdfast.system import io_pool
from holdfast.telemetry.reporter import Reporter

logger = logging.getLogger("holdfast")


class Pinned:
    """What retention leaves, whatever its rules. For the thread of the link and for retention."""

    def __init__(self, store: Store, job: str, reporter: Reporter) -> None:
        self._store, self._job, self._reporter = store, job, reporter
        self._checkpoints: tuple[str, ...] | None = None
        """None while neither the server nor the store has said."""
        self._noted: tuple[str, ...] | None = None
        """By this attempt. It notes again what it found, so that a late note of the one before counts no more."""
        self._learned = self._faulty = False
        self._looked_for: set[str] = set()
        self._lock = threading.Lock()

    @property
    def checkpoints(self) -> tuple[str, ...]:
        return self._checkpoints or ()

    def follow(self, wanted: tuple[str, ...] | None, attempt: int) -> None:
        """Keep what the server says; None: it says nothing. It holds at once, noted or not.

        The store is asked on another thread: the one that calls hears of orders as well.
        """
        if wanted is not None:
            self._checkpoints = wanted
            io_pool.submit(lambda: self._note_and_look(attempt))

    def _note_and_look(self, attempt: int) -> None:
        self.note(attempt)
        self._look_for_them()

    def learn(self) -> None:
        """What an earlier attempt has noted holds, unless a server has spoken. OSError: the store cannot say."""
        if self._learned:
            return
        found = newest_pins(self._store, self._job)
        with self._lock:
            self._learned = True
            if self._checkpoints is None:
                self._checkpoints = found.checkpoints if found is not None else ()
            if found is None and self._noted is None:
                self._noted = ()  # most jobs never see a pin, nor a note

    def note(self, attempt: int) -> None:
        """Note them in the store; what cannot be noted holds as well, is told once and tried again when called."""
        with self._lock:
            wanted = self._checkpoints
            if wanted is None or wanted == self._noted:
                return
            try:
                if not attempt:
                    raise OSError("it is not writable")
                self._store.append(self._job, Pins(attempt=attempt, checkpoints=wanted, at=time.time()))
            except Fenced as error:  # the newer attempt is told of them for itself
                logger.debug("%s: pins are not noted: %s", self._job, error)
            except OSError as error:
                self._tell_unnoted(error)
            else:
                self._noted, self._faulty = wanted, False

    def _tell_unnoted(self, error: OSError) -> None:
        if not self._faulty:
            self._faulty = True
            what = f"pins cannot be noted in store {self._store.url}: {error.strerror or error}"
            self._reporter.notice(
                "warning", "pins", f"{what}; they hold while this attempt runs, and each checkpoint tries again"
            )

    def _look_for_them(self) -> None:
        """Say once of each that is not in the store: its pin keeps nothing."""
        with self._lock:
            unknown = set(self.checkpoints) - self._looked_for
            if not unknown:
                return
            try:
                unknown -= set(self._store.checkpoints(self._job))
            except OSError:  # what cannot be listed cannot be told
                return
            self._looked_for |= unknown
        for checkpoint in sorted(unknown):
            message = f"{checkpoint} is pinned, and is not in the store: there is nothing to keep"
            self._reporter.notice("warning", "pins", message)
