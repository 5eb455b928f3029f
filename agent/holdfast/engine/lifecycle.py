"""The life of a session: its states, and which of them may follow which."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from enum import Enum

from holdfast.errors import RestoreFailed
from holdfast.system import supervisor_channel
from holdfast.system.preemption import EXIT_SIGTERM
from holdfast.telemetry.reporter import TrainingPosition

logger = logging.getLogger("holdfast")

WRITE_SECONDS = 600.0
"""How long an end or a restore waits for the checkpoint of the current state."""


class Life(Enum):
    """State of a session."""

    STARTING = "starting"
    """Training has not begun: a failed resume can be retried."""
    TRAINING = "training"
    RESTORING = "restoring"
    """Restoring a checkpoint in place, at a boundary."""
    DETACHED = "detached from the other ranks"
    """Another rank is lost: training continues without checkpoints."""
    REPLACED = "replaced by a newer attempt"
    """Training continues without checkpoints and reports; under a supervisor it ends."""
    PREEMPTED = "preempted"
    """Ending after SIGTERM."""
    ENDED = "ended"
    """Ending, as an operator requested."""
    RELAUNCHED = "relaunched"
    """Ending, so that the supervisor restarts it at another checkpoint."""
    HALF_RESTORED = "half restored"
    """A restore failed or was interrupted while it was applied: the state is unusable."""
    CLOSING = "closing"
    CLOSED = "closed"
    FORKED = "forked"
    """In a forked child process, which has none of the session's threads and must not save."""


TRANSITIONS: Mapping[Life, frozenset[Life]] = {
    Life.STARTING: frozenset({Life.TRAINING, Life.DETACHED, Life.CLOSING}),
    Life.TRAINING: frozenset(
        {Life.RESTORING, Life.ENDED, Life.DETACHED, Life.REPLACED, Life.PREEMPTED, Life.CLOSING}
    ),
    Life.RESTORING: frozenset({Life.TRAINING, Life.RELAUNCHED, Life.HALF_RESTORED, Life.CLOSING}),
    Life.DETACHED: frozenset({Life.REPLACED, Life.PREEMPTED, Life.CLOSING}),
    Life.REPLACED: frozenset({Life.PREEMPTED, Life.CLOSING, Life.CLOSED}),
    Life.PREEMPTED: frozenset({Life.CLOSING}),
    Life.ENDED: frozenset({Life.CLOSING}),
    Life.RELAUNCHED: frozenset({Life.CLOSING}),
    Life.HALF_RESTORED: frozenset({Life.CLOSING}),
    Life.CLOSING: frozenset({Life.REPLACED, Life.CLOSED}),
    Life.CLOSED: frozenset(),
    Life.FORKED: frozenset(),
}
"""In addition, any state becomes FORKED in a forked child."""


class Lifecycle:
    """The state of one session. For the training thread only.

    Raises:
        RuntimeError: `enter` was called with a state that cannot follow, a defect of Holdfast.
    """

    def __init__(self) -> None:
        self._state = Life.STARTING
        self._pid = os.getpid()

    @property
    def state(self) -> Life:
        if os.getpid() != self._pid:
            self._state = Life.FORKED
        return self._state

    def enter(self, state: Life) -> None:
        if state not in TRANSITIONS[self.state]:
            raise RuntimeError(f"a session that is {self._state.value} cannot become {state.value}")
        self._state = state

    @property
    def is_over(self) -> bool:
        """Nothing is left to close."""
        return self.state in (Life.CLOSING, Life.CLOSED, Life.FORKED)

    @property
    def only_counts(self) -> bool:
        """Iterations are counted only."""
        return self.is_over or self._state is Life.HALF_RESTORED

    def why_uncounted(self, iteration: int) -> str:
        """Why `iteration` and those after it are only counted."""
        if self.state is Life.FORKED:
            return (
                "this process was forked from the one that made the session, and takes no checkpoints; create the "
                "session after the fork"
            )
        if self.state is Life.HALF_RESTORED:
            return (
                f"a restore failed while it was applied: iteration {iteration:,} and those after it are in no "
                "checkpoint; restart the script"
            )
        return (
            f"session.step() after session.close(): iteration {iteration:,} and those after it are in no "
            "checkpoint; create a new Session to continue training"
        )

    @property
    def is_ending(self) -> bool:
        """The loop is to end at this boundary."""
        return self._state in (Life.PREEMPTED, Life.ENDED, Life.RELAUNCHED)

    def ending(self, reason: str) -> str:
        """Return the reason to report if the script ends the session for `reason`."""
        if self._state is Life.HALF_RESTORED and reason == "finished":  # the script closes in a `finally`
            return RestoreFailed.__name__
        return self._state.value if self.is_ending else reason

    def close(self, job: str, parts: Iterable[Callable[[], object]]) -> None:
        """Close `parts` in this order, whether or not one of them fails."""
        with contextlib.ExitStack() as stack:
            # torch's handler raises when a loader worker has died, which would interrupt a part, or end this loop
            is_main = threading.current_thread() is threading.main_thread()
            if is_main and callable(signal.getsignal(signal.SIGCHLD)):
                stack.callback(signal.signal, signal.SIGCHLD, signal.signal(signal.SIGCHLD, signal.SIG_DFL))
            for part in parts:
                try:
                    part()
                except Exception:  # must not hide the error that ends the loop
                    logger.exception("%s: while closing", job)
            self.enter(Life.CLOSED)

    @property
    def exit_status(self) -> int | None:
        """The status that the process is to exit with at this boundary; None: training goes on."""
        if self._state is Life.PREEMPTED:
            return EXIT_SIGTERM
        if self._state is Life.ENDED:
            return supervisor_channel.EXIT_ENDED
        if self._state is Life.RELAUNCHED:
            return supervisor_channel.EXIT_RELAUNCH
        if self._state is Life.REPLACED and supervisor_channel.is_supervised():
            return supervisor_channel.EXIT_FENCED
        return None


def ending_of(error: type[BaseException] | None) -> str:
    """The reason that an attempt reports when its loop ends with this error, or with none."""
    if error is None or issubclass(error, GeneratorExit):
        return "finished"
    return "interrupted" if issubclass(error, KeyboardInterrupt) else error.__name__


class RestoreCallbacks:
    """Calls each callback with (iteration, lineage) after a resume or a restore. For the training thread only."""

    def __init__(self, position: TrainingPosition) -> None:
        self._position = position
        self._callbacks: list[Callable[[int, int], object]] = []
        self._restored_to: tuple[int, int] | None = None
        """(iteration, lineage) that training last went back to; `None` after a fresh start."""
        self.began_at = self.ended_at = 0.0
        """Unix times of the last resume or restore."""

    def add(self, callback: Callable[[int, int], object]) -> None:
        """Register a callback; call it at once if training has gone back already."""
        self._callbacks.append(callback)
        if self._restored_to is not None:
            self._call(callback, *self._restored_to)

    def begin(self) -> None:
        """Note when a resume or a restore begins."""
        self.began_at = time.time()

    def run(self) -> None:
        """Call all callbacks: training has gone back to the current position."""
        self.ended_at = time.time()
        self._restored_to = self._position.iteration, self._position.lineage
        for callback in tuple(self._callbacks):
            self._call(callback, *self._restored_to)

    def _call(self, callback: Callable[[int, int], object], iteration: int, lineage: int) -> None:
        try:
            callback(iteration, lineage)
        except Exception:  # code of the script: its failure must not end training
            logger.exception("a callback of session.on_restored failed; training continues")
