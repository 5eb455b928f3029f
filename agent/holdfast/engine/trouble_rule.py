"""The rule `on_trouble`: when the loss is wrong, restore the last good checkpoint without that data."""

from __future__ import annotations

import logging
import time
import uuid

from holdfast.checkpoint import restore
from holdfast.checkpoint.retention_queue import Protector
from holdfast.distributed.ranks import Ranks
from holdfast.engine.coordination import AGREE_EVERY_SECONDS, Halt, RestoreTarget
from holdfast.protocol.ids import parse_checkpoint_id
from holdfast.protocol.orders import POLICY, DataSkip, OnTrouble
from holdfast.save.saver import Saver
from holdfast.store import Lineage
from holdfast.telemetry.loss_watch import LossWatch
from holdfast.telemetry.reporter import Reporter

logger = logging.getLogger("holdfast")

RETRY_SECONDS = 10.0
"""Time after which a store that could not be read is asked again."""
AFTER_TROUBLE = 5
"""Iterations after the first wrong loss whose data is left out as well."""


class TroubleRule:
    """Decides on restores without an operator and without a server. For the training thread.

    Every rank watches its own losses. Rank 0 learns of the others' through the store of torch.distributed, which
    it asks as it asks for requested exits, and decides; all ranks then act at the same boundary.
    """

    def __init__(self, rule: OnTrouble, watch: LossWatch, saver: Saver, reporter: Reporter, ranks: Ranks) -> None:
        self._rule, self._watch, self._ranks = rule, watch, ranks
        self._history, self._retention, self._reporter = saver.history, saver.retention, reporter
        self._lineage = 0
        """Lineage whose trouble was reported or decided on."""
        self._target: RestoreTarget | None = None
        self.halt: Halt | None = None
        """What is due where restores have not helped, until `accept_halt` or `restarted`."""
        self._asked_at = self._retry_at = 0.0
        self._has_failed = False
        """The store could not be read when a decision was due, as was reported."""

    def change(self, rule: OnTrouble) -> None:
        """Follow another rule from now on, and drop what was due by the previous one."""
        self._rule, self._target, self.halt = rule, None, None

    def report(self) -> None:
        """Report trouble of this rank to rank 0."""
        lineage = self._history.lineage.number
        if self._ranks.leads or self._watch.trouble is None or self._lineage == lineage:
            return
        self._lineage = lineage
        self._ranks.report_trouble(lineage, self._watch.trouble)

    @property
    def withholds(self) -> bool:
        """Whether no scheduled checkpoint is to be taken: the state may be a wrong one."""
        return self._rule.mode == "restore" and self._watch.is_suspicious and self._is_open

    @property
    def _is_open(self) -> bool:
        return self._lineage != self._history.lineage.number or self._target is not None

    def target(self) -> RestoreTarget | None:
        """Return the restore that is due, on rank 0, until `accept` or `restarted`."""
        is_due = self._is_open and self._rule.is_on and time.monotonic() >= self._retry_at
        if self._target is not None or not is_due:
            return self._target
        trouble = self._first_trouble()
        if trouble is not None:
            self._decide(trouble)
        return self._target

    def accept(self) -> None:
        """Record that the restore is carried out: whether it succeeds or not, this lineage gets no other."""
        self._target = None

    def accept_halt(self) -> None:
        """Record that training is halted."""
        self.halt = None

    def restarted(self, iteration: int) -> None:
        """Continue after a restore, whether this rule or an operator requested it."""
        self._watch.restart(iteration)
        self._target, self.halt, self._lineage, self._has_failed = None, None, 0, False
        self._retention.protect(Protector.TROUBLE, None)

    def _first_trouble(self) -> int | None:
        """Return the first iteration of trouble on any rank."""
        own, now = self._watch.trouble, time.monotonic()
        if own is None and now < self._asked_at + AGREE_EVERY_SECONDS:
            return None
        self._asked_at = now
        reported = self._ranks.reported_trouble(self._history.lineage.number)
        return min((each for each in (own, reported) if each is not None), default=None)

    def _decide(self, trouble: int) -> None:
        history = self._history
        try:
            earlier = [
                each
                for each in history.store.records(history.job, Lineage)
                if each.trouble is not None and abs(each.trouble - trouble) < self._rule.within
            ]
            good = self._good(trouble, {each.parent for each in earlier})
            kept = good or self._good(trouble, set())
        except OSError as error:
            self._retry_at = time.monotonic() + RETRY_SECONDS
            if not self._has_failed:
                self._has_failed = True
                what = (
                    f"the loss is wrong from iteration {trouble:,} on, and the store cannot be read yet: {error}"
                )
                self._reporter.notice("warning", "trouble", what)
            return
        self._lineage = history.lineage.number
        self._retention.protect(Protector.TROUBLE, kept)  # also where an operator is to decide
        if len(earlier) >= self._rule.most:
            times = f"{len(earlier)} restores in {self._rule.within:,} iterations"
            self._give_up(trouble, f"{times} have not helped")
        elif good is None:
            self._give_up(trouble, "no durable checkpoint from before it is left to try")
        else:
            self._restore(trouble, good)

    def _good(self, trouble: int, tried: set[str | None]) -> str | None:
        """Return the newest durable checkpoint before the trouble. One from which it came again is not good.

        The loss of an iteration is that of the state before its update: the trouble may be in that state already.
        """
        history = self._history
        known = restore.lineage_checkpoints(history.store, history.job)
        before = (each for each in known if parse_checkpoint_id(each)[0] < trouble - 1 and each not in tried)
        return next((each for each in before if not history.is_damaged(each)), None)

    def _restore(self, trouble: int, good: str) -> None:
        upto, at = trouble + AFTER_TROUBLE, parse_checkpoint_id(good)[0]
        what = f"the loss is wrong from iteration {trouble:,} on"
        if self._rule.mode == "observe":
            would = f"on_trouble='restore' would restore iteration {at:,} and leave out the data up to {upto:,}"
            self._reporter.notice("warning", "trouble", f"{what}: {would}")
            return
        self._reporter.notice(
            "warning", "trouble", f"{what}: restoring iteration {at:,} without the data up to iteration {upto:,}"
        )
        skip = DataSkip(to_iteration=upto)
        self._target = RestoreTarget(good, uuid.uuid4().hex, skip=skip, trouble=trouble)

    def _give_up(self, trouble: int, why: str) -> None:
        then = self._rule.then if self._rule.mode == "restore" else "alert"
        if then != "alert":
            self.halt = Halt(then, POLICY)
        follows = {"alert": "the job continues unchanged", "pause": "training is paused", "end": "training ends"}[
            then
        ]
        message = f"the loss is wrong from iteration {trouble:,} on, and {follows}: {why}"
        self._reporter.notice("error", "trouble", message)
