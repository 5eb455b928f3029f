"""What operators want of this job, held against what it already did."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import msgspec

from holdfast.pacing import Settings, parse_budget, parse_every, parse_policy
from holdfast.protocol.messages import Desired, RestoreOrder
from holdfast.protocol.retention import Retention, parse_retention
from holdfast.store import Attempt, Ending, Lineage, Store
from holdfast.telemetry.reporter import Reporter

MOST_WITHHELD_SECONDS = 86400.0
"""A server's settings keep an attempt from checkpoints no longer: then one is taken all the same."""
MOST_TRIES = 3
"""Starts of a job that end before one order is carried out: then it is the order that is at fault."""

T = TypeVar("T")


class Orders:
    """Follows the desired state. Every method but `arrived` is for the training thread, between iterations.

    Orders come as state, not as messages: a newer version replaces all before it, and the same one seen
    twice changes nothing. A restore is carried out once: the lineage it begins names it, durably, before
    anything is touched. One whose time is over by the server's clock is not carried out.
    """

    def __init__(
        self,
        store: Store,
        job: str,
        reporter: Reporter,
        base: Settings,
        *,
        retention: Retention,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._job, self._reporter, self._clock = store, job, reporter, clock
        self.base = base
        """What holds where no operator says otherwise."""
        self._retention = retention
        self.first = Desired()
        """As it was when this attempt started."""
        self.attempt = 0
        self.pauses = 0
        self._seen = self._before = Desired()
        self._answered: set[str] = set()
        """Orders that were decided on, or that need nothing to be done."""
        self._withheld_told = False
        self._ends_at: dict[str, float] = {}
        """When the time of an order is over, on this machine's clock."""

    def start(self, first: Desired | None, attempt: int) -> None:
        self.first, self.attempt = first or Desired(), attempt
        self._count_down(self.first.restore)
        # a click from before this attempt is not for it; a restore order is
        self._seen = Desired(
            checkpoint_request=self.first.checkpoint_request, probe_request=self.first.probe_request
        )

    def arrived(self, desired: Desired) -> None:
        """Called by the link's thread: say that an order got here, well before the boundary that acts on it."""
        order = desired.restore
        self._count_down(order)
        if order is not None and order.id not in self._answered:
            self._reporter.order(order.id, "delivered")

    def settings(self) -> Settings:
        """Operator's order > argument > environment > default."""
        seen, base = self._seen, self.base
        return replace(
            base,
            budget=self._parsed("budget", parse_budget, seen.budget, base.budget),
            policy=self._parsed("policy", parse_policy, seen.policy, base.policy),
            every=self._parsed("every", parse_every, seen.every, base.every),
            paused=seen.paused or self.pauses > 0,
        )

    def withhold(self, seconds: float) -> bool:
        """Whether a server's settings, not the script's, have kept the job from checkpoints for too long."""
        seen = self._seen
        orders = seen.paused or (seen.every, seen.budget, seen.policy) != (None, None, None)
        return seconds >= MOST_WITHHELD_SECONDS and orders and not self.pauses and not self.base.paused

    def tell_withheld(self) -> None:
        """Report, once, that a checkpoint is taken against these settings."""
        if not self._withheld_told:
            self._withheld_told = True
            self._reporter.notice(
                "warning",
                "withheld",
                "settings from the server have kept this job from checkpoints for a day: one is taken now, "
                "and then one a day for as long as they do",
            )

    def _parsed(self, name: str, parse: Callable[[Any], T], wanted: object, own: T) -> T:
        """What a server wants of a setting; the script's own where it says nothing, or what cannot be."""
        if wanted is None:
            return own
        try:
            return parse(wanted)
        except ValueError as error:
            self._reporter.notice("warning", name, f"{error}; the script's own {name} holds")
            return own

    def retention(self, desired: Desired | None = None) -> Retention:
        """The same of the rules by which checkpoints are kept; as `desired`, or what was seen last, has them."""
        wanted = (self._seen if desired is None else desired).retention
        return self._parsed("retention", parse_retention, wanted, self._retention)

    def news(self, desired: Desired | None) -> bool:
        """Whether `desired` says something not acted on yet; from now on it counts as acted on."""
        # compared whole: the version of a server whose data was deleted starts again and may come to the same
        if desired is None or _orders_of(desired) == _orders_of(self._seen):
            return False
        self._before, self._seen = self._seen, desired
        return True

    def reopen(self) -> None:
        """Make the order of the start an open one again, which the next boundary carries out."""
        if self.first.restore is not None:
            self._answered.discard(self.first.restore.id)

    @property
    def checkpoint_requested(self) -> bool:
        """Somebody clicked since the version before; ask right after `news`."""
        return self._seen.checkpoint_request not in (0, self._before.checkpoint_request)

    @property
    def probe_requested(self) -> bool:
        """The same of a probe of the data."""
        return self._seen.probe_request not in (0, self._before.probe_request)

    def restore(self, desired: Desired | None = None) -> RestoreOrder | None:
        """The open restore order, if it is for this attempt and was not carried out before.

        It is returned again until `accept` is called with it.
        """
        order = (desired or self._seen).restore
        if order is None or order.id in self._answered:
            return None
        if self.attempt and order.fence > self.attempt:
            return None
        try:
            lineages = self._store.records(self._job, Lineage)
        except OSError:
            if desired is None:  # no further boundary waits for a store that is away: the next start asks again
                self.accept(order.id)
            raise
        began = next((each for each in lineages if each.order == order.id), None)
        if began is not None:
            reason = "carried out before the trainer was restarted"
            self.accept(order.id)
            self._reporter.order(order.id, "restored", reason=reason, safety=began.left, began=began)
            return None
        if self._clock() >= self._ends_at.get(order.id, float("inf")):
            self.accept(order.id)
            self._reporter.order(order.id, "expired", reason="its time was over when the job came to it")
            return None
        return order

    def accept(self, order: str | None) -> None:
        """An order was decided on: it is not open any more."""
        if order is not None:
            self._answered.add(order)

    def restore_at_start(self) -> RestoreOrder | None:
        """The one that was open when this attempt started."""
        order = self.restore(self.first)
        if order is None:
            return None
        tries = self._tries(order)
        self.accept(order.id)
        if tries > MOST_TRIES:
            reason = f"{tries - 1} starts that were to carry it out ended before they had: none tries it again"
            self._reporter.order(order.id, "failed", reason=reason)
            told = f"the order to restore {order.checkpoint} is given up: {reason}"
            self._reporter.notice("error", "restore", told)
            return None
        return order

    def _tries(self, order: RestoreOrder) -> int:
        """How many attempts in a row, this one included, began with it to carry out and have not trained."""
        trained = {ending.attempt for ending in self._store.records(self._job, Ending) if ending.iterations > 0}
        tries = 0
        for attempt in reversed(self._store.records(self._job, Attempt)):
            if attempt.order != order.id or attempt.number in trained:
                break
            tries += 1
        return tries

    def _count_down(self, order: RestoreOrder | None) -> None:
        """Its time runs from when it got here; told again, the earlier end counts."""
        if order is not None and order.expires_in_seconds is not None:
            ends_at = self._clock() + order.expires_in_seconds
            self._ends_at[order.id] = min(ends_at, self._ends_at.get(order.id, ends_at))


def _orders_of(desired: Desired) -> Desired:
    """Without what the server has seen, and the time that has passed: these are no orders."""
    order = desired.restore
    held = None if order is None else msgspec.structs.replace(order, expires_in_seconds=None)
    return msgspec.structs.replace(desired, latest_attempt=0, latest_lineage=0, restore=held)
