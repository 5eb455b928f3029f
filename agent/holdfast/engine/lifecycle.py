"""The life of a session: its states, and which of them may follow which."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from enum import Enum

from holdfast.errors import RestoreFailed
from holdfast.system import supervisor_channel
from holdfast.system.preemption import EXIT_SIGTERM

logger = logging.getLogger("holdfast")


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
    Life.TRAINING: frozenset({Life.RESTORING, Life.DETACHED, Life.REPLACED, Life.PREEMPTED, Life.CLOSING}),
    Life.RESTORING: frozenset({Life.TRAINING, Life.RELAUNCHED, Life.HALF_RESTORED, Life.CLOSING}),
    Life.DETACHED: frozenset({Life.REPLACED, Life.PREEMPTED, Life.CLOSING}),
    Life.REPLACED: frozenset({Life.PREEMPTED, Life.CLOSING, Life.CLOSED}),
    Life.PREEMPTED: frozenset({Life.CLOSING}),
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
                "this process was forked from the one that made the session, and takes no checkpoints; make the "
                "session after the fork"
            )
        if self.state is Life.HALF_RESTORED:
            return (
                f"a restore failed while it was applied: iteration {iteration:,} and those after it are in no "
                "checkpoint; start the script again"
            )
        return (
            f"session.step() after session.close(): iteration {iteration:,} and those after it are in no "
            "checkpoint; make a new Session to train on"
        )

    @property
    def is_ending(self) -> bool:
        """The loop is to end at this boundary."""
        return self._state in (Life.PREEMPTED, Life.RELAUNCHED)

    def ending(self, reason: str) -> str:
        """Return the reason to report if the script ends the session for `reason`."""
        if self._state is Life.HALF_RESTORED and reason == "finished":  # the script closes in a `finally`
            return RestoreFailed.__name__
        return self._state.value if self.is_ending else reason

    def close(self, job: str, parts: Iterable[Callable[[], object]]) -> None:
        """Close `parts` in this order, whether or not one of them fails."""
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
