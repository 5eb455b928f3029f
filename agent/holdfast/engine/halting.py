"""Halts: training pauses at a boundary until an operator continues it, or ends there on request.

Rank 0 decides in rounds, so that each wait of the other ranks is short, in the gloo group of this package. None of
them waits in a collective of the training group, whose watchdog would report it. A note in the store has a restart
stay paused, and `holdfast continue --store` go on without a server.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Literal

from holdfast.distributed.ranks import Ranks
from holdfast.engine.coordination import Halt
from holdfast.engine.lifecycle import Life, Lifecycle
from holdfast.engine.operator import Operator
from holdfast.errors import Fenced, printable
from holdfast.protocol.orders import HaltReport, HaltState
from holdfast.save.history import History
from holdfast.store.records import HaltNote, newest_halt
from holdfast.system import supervisor_channel
from holdfast.system.supervisor_channel import ProgressFile
from holdfast.telemetry.reporter import Reporter

logger = logging.getLogger("holdfast")

ROUND_SECONDS = 0.25
"""Time between two checks of what operators want."""
STORE_ROUND_SECONDS = 5.0
"""Time between two checks of the store."""

Next = Literal["stay", "continue", "end", "exit", "restore", "fenced"]


def standing_halt(history: History, operator: Operator) -> Halt | None:
    """Return the pause that an attempt before this one was in, unless an operator has ended it since."""
    try:
        note = newest_halt(history.store, history.job)
    except OSError as error:
        logger.warning("%s: whether training is paused cannot be read: %s", history.job, error)
        return None
    if note is None:
        return None
    order = operator.training_order()
    if order is not None and order.id == note.order:
        operator.accept(order.id)  # it was carried out before this start
        order = None
    return Halt("pause", note.by, note.order) if note.state == "paused" and order is None else None


class Halting:
    """Carries out halts, on all ranks at the same boundary. For the training thread.

    Args:
        save: makes the current state durable, unless it is, and returns whether it is.
        restore: carries out the restore that is due.
        is_restore_due: returns whether an operator wants one; asked on rank 0.
        is_exit_requested: returns whether a rank has received SIGTERM.
        request_exit: on other ranks, has rank 0 learn that this one has.
    """

    def __init__(
        self,
        history: History,
        operator: Operator,
        reporter: Reporter,
        ranks: Ranks,
        lifecycle: Lifecycle,
        progress: ProgressFile | None,
        *,
        save: Callable[[], bool],
        restore: Callable[[], None],
        is_restore_due: Callable[[], bool],
        is_exit_requested: Callable[[], bool],
        request_exit: Callable[[], None],
    ) -> None:
        self._history, self._operator, self._reporter, self._ranks = history, operator, reporter, ranks
        self._lifecycle, self._progress = lifecycle, progress
        self._save, self._restore, self._is_restore_due = save, restore, is_restore_due
        self._is_exit_requested, self._request_exit = is_exit_requested, request_exit
        self._store_read_at = 0.0
        self._is_noted = False
        """The store has a note of the pause: only a later one continues training."""
        self._next_halt = Halt("continue")
        """Who ends the pause, and how."""

    def act(self, halt: Halt) -> None:
        """Pause or end training. An end without a durable checkpoint is refused.

        The rule `on_trouble` halts without one: the newest is from before the trouble.
        """
        if self._progress is not None:
            self._progress.rest()
        try:
            is_saved = halt.order is None or self._save()
            if halt.action == "pause":
                if not is_saved:
                    self._notice("warning", "the checkpoint before the pause failed: a crash now loses more work")
                halt = self._pause(halt)
                is_saved = halt.action != "end" or self._save()
            if halt.action == "end":
                self._end(halt) if is_saved else self._refuse_to_end(halt)
        finally:
            if self._progress is not None and not self._lifecycle.is_ending:
                self._progress.rest(is_resting=False)

    def _pause(self, halt: Halt) -> Halt:
        """Wait until an operator continues or ends training, or a signal ends it; return how it continues."""
        self._report("paused", halt)
        self._notice("warning", f"training is paused by {halt.by} {self._where}; {self._way_on}")
        while True:
            step = self._ranks.decide(self._next_or_stay, Next)
            if not self._ranks.leads:
                self._request_exit()
            if step == "restore":
                self._restore()
            elif step == "exit":
                self._notice("warning", f"SIGTERM received while training is paused; ending {self._where}")
                self._lifecycle.enter(Life.PREEMPTED)
            if step == "fenced" or self._lifecycle.is_ending:
                return halt  # the next start is paused as well
            if step in ("continue", "end"):
                halt = self._ranks.decide(lambda: self._next_halt, Halt)
                if step == "continue":
                    self._report("continued", halt)
                    self._notice("info", f"training continues {self._where}, as requested by {halt.by}")
                return halt

    @property
    def _where(self) -> str:
        """Current position in training, which a restore during the pause changes."""
        return f"after iteration {self._reporter.position.iteration:,}"

    @property
    def _way_on(self) -> str:
        store, job = self._history.store.url, self._history.job
        command = f"holdfast continue {job}"
        return f"`{command}` continues it, without a server `{command} --store {store}`"

    def _next_or_stay(self) -> Next:
        time.sleep(ROUND_SECONDS)
        try:
            return self._next()
        except Exception:  # a store that cannot be read, or a defect: neither may end the pause
            logger.debug("%s: while paused", self._history.job, exc_info=True)
            return "stay"

    def _next(self) -> Next:
        """Decide on rank 0 how the pause goes on."""
        if self._is_exit_requested():
            return "exit"
        if self._reporter.has_server:
            self._operator.follow()
            if self._reporter.is_fenced and self._history.fenced:
                return "fenced"
        if self._is_restore_due():
            return "restore"
        order = self._operator.training_order()
        if order is not None:
            self._operator.accept(order.id)
            if order.action != "pause":
                self._next_halt = Halt(order.action, order.who, order.id)
                return order.action
        return "continue" if self._is_continued_in_store() else "stay"

    def _is_continued_in_store(self) -> bool:
        now = time.monotonic()
        if not self._is_noted or now < self._store_read_at + STORE_ROUND_SECONDS:
            return False
        self._store_read_at = now
        note = newest_halt(self._history.store, self._history.job)
        if note is None or note.state != "continued":
            return False
        self._next_halt = Halt("continue", note.by, note.order)
        return True

    def _end(self, halt: Halt) -> None:
        how = f"ended by {halt.by} at iteration {self._reporter.position.iteration:,}"
        self._report("ended", halt)
        self._notice("info", f"training is {how}")
        supervisor_channel.publish_ended(how)
        self._lifecycle.enter(Life.ENDED)

    def _refuse_to_end(self, halt: Halt) -> None:
        reason = "there is no durable checkpoint of this iteration"
        self._report("failed", halt, reason)
        self._notice("error", f"training continues, although {halt.by} requested its end: {reason}")

    def _report(self, state: HaltState, halt: Halt, reason: str | None = None) -> None:
        """Note the state in the store, and report it."""
        if not self._ranks.leads:
            return
        history, position, now = self._history, self._reporter.position, time.time()
        known = self._operator.newest_training_order
        if state != "failed" and history.attempt:
            note = HaltNote(
                attempt=history.attempt, state=state, by=halt.by, order=known or halt.order,
                iteration=position.iteration, at=now,
            )  # fmt: skip
            try:
                history.store.append(history.job, note)
                self._is_noted = True
            except (OSError, Fenced) as error:
                self._notice("warning", f"cannot record in the store that training is {state}: {error}")
        self._reporter.event(
            HaltReport(
                at=now, iteration=position.iteration, lineage=position.lineage, state=state,
                by=printable(halt.by), order=halt.order, reason=reason,
            )
        )  # fmt: skip

    def _notice(self, level: Literal["info", "warning", "error"], text: str) -> None:
        self._reporter.notice(level, "halt", text)
