"""Requests and settings of operators, compared with what the job already did."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import msgspec

from holdfast.pacing import PacingSettings, interval_time, parse_budget, parse_every, parse_policy
from holdfast.pacing.settings import parse_unsaved_work, parse_write_budget
from holdfast.protocol.wire import Desired, RestoreOrder
from holdfast.retention import Retention, parse_retention
from holdfast.store import Attempt, Ending, Lineage, Store
from holdfast.telemetry.reporter import Reporter
from holdfast.units import FixedInterval

MAX_WITHHELD_SECONDS = 86400.0
"""Longest time that server settings can suppress checkpoints: then one is taken all the same."""
MAX_TRIES = 3
"""Starts that may end before they carry out one order; then the order has failed."""

T = TypeVar("T")


class Orders:
    """Follows the desired state. Every method but `on_received` is for the training thread, between iterations.

    Orders are state, not messages: a newer version replaces older ones, and the same version twice changes
    nothing. A restore is carried out once: the lineage that it begins names it durably before anything changes.
    An expired order is not carried out.
    """

    def __init__(
        self,
        store: Store,
        job: str,
        reporter: Reporter,
        base: PacingSettings,
        *,
        retention: Retention,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._job, self._reporter, self._clock = store, job, reporter, clock
        self.base = base
        """Settings of the script, for what no operator has set."""
        self._retention = retention
        self.first = Desired()
        """Desired state when this attempt started."""
        self.attempt = 0
        self.pauses = 0
        self._seen = self._before = Desired()
        self._answered: set[str] = set()
        """Orders that were decided on, or need no action."""
        self._withheld_reported = False
        self._ends_at: dict[str, float] = {}
        """Deadlines of orders, on the local clock."""

    def start(self, first: Desired | None, attempt: int) -> None:
        self.first, self.attempt = first or Desired(), attempt
        self._note_deadline(self.first.restore)
        # only restore orders survive the previous attempt, not other requests
        self._seen = Desired(
            checkpoint_request=self.first.checkpoint_request, probe_request=self.first.probe_request
        )

    def on_received(self, desired: Desired) -> None:
        """Report an order as delivered, on the polling thread, before a boundary acts on it."""
        order = desired.restore
        self._note_deadline(order)
        if order is not None and order.id not in self._answered:
            self._reporter.order(order.id, "delivered")

    def settings(self) -> PacingSettings:
        """Return the settings in force: operator > argument > environment > default."""
        seen, base = self._seen, self.base
        return replace(
            base,
            budget=self._parsed("budget", parse_budget, seen.budget, base.budget),
            write_bytes_per_second=self._parsed(
                "write_budget", parse_write_budget, seen.write_bytes_per_second, base.write_bytes_per_second
            ),
            max_unsaved_seconds=self._parsed(
                "max_unsaved_work", parse_unsaved_work, seen.max_unsaved_seconds, base.max_unsaved_seconds
            ),
            policy=self._parsed("policy", parse_policy, seen.policy, base.policy),
            every=self._every(),
            paused=seen.paused or self.pauses > 0,
        )

    def is_withheld_too_long(self, seconds: float) -> bool:
        """Return whether server settings, not the script's, have suppressed checkpoints for too long."""
        seen = self._seen
        settings = (seen.every, seen.interval_seconds, seen.budget, seen.policy, seen.write_bytes_per_second)
        orders = seen.paused or any(each is not None for each in settings)
        return seconds >= MAX_WITHHELD_SECONDS and orders and not self.pauses and not self.base.paused

    def report_withheld(self) -> None:
        """Report once that a checkpoint is taken against these settings."""
        if not self._withheld_reported:
            self._withheld_reported = True
            self._reporter.notice(
                "warning",
                "withheld",
                "settings from the server have suppressed checkpoints for a day: taking one now, and one a day "
                "while they do",
            )

    def _every(self) -> FixedInterval | None:
        seen, own = self._seen, self.base.every
        if seen.interval_seconds is not None:
            return self._parsed("every", interval_time, seen.interval_seconds, own)
        return self._parsed("every", parse_every, seen.every, own)

    def _parsed(self, name: str, parse: Callable[[Any], T], wanted: object, own: T) -> T:
        """Return the server's value of a setting, or the script's where it is missing or invalid."""
        if wanted is None:
            return own
        try:
            return parse(wanted)
        except ValueError as error:
            self._reporter.notice("warning", name, f"{error}; the script's {name} stays in force")
            return own

    def retention(self, desired: Desired | None = None) -> Retention:
        """Return the retention rules in force, by `desired` or by the last desired state."""
        wanted = (self._seen if desired is None else desired).retention
        return self._parsed("retention", parse_retention, wanted, self._retention)

    def has_changed(self, desired: Desired | None) -> bool:
        """Return whether `desired` differs from the last desired state, and remember it."""
        # compared whole: the version of a server whose data was deleted starts again and may come to the same
        if desired is None or _orders_of(desired) == _orders_of(self._seen):
            return False
        self._before, self._seen = self._seen, desired
        return True

    def reopen(self) -> None:
        """Reopen the order of the start, for the next boundary."""
        if self.first.restore is not None:
            self._answered.discard(self.first.restore.id)

    @property
    def checkpoint_requested(self) -> bool:
        """An operator requested a checkpoint in the last change; read it right after `has_changed`."""
        return self._seen.checkpoint_request not in (0, self._before.checkpoint_request)

    @property
    def probe_requested(self) -> bool:
        """The same for a data-loading probe."""
        return self._seen.probe_request not in (0, self._before.probe_request)

    def restore(self, desired: Desired | None = None) -> RestoreOrder | None:
        """Return the open restore order, if it is for this attempt and was not carried out.

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
            if (
                desired is None
            ):  # later boundaries must not wait for an unavailable store: the next start asks again
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
            self._reporter.order(order.id, "expired", reason="it expired before the job could carry it out")
            return None
        return order

    def accept(self, order: str | None) -> None:
        """Close an order that was decided on."""
        if order is not None:
            self._answered.add(order)

    def restore_at_start(self) -> RestoreOrder | None:
        """Return the restore order that was open when this attempt started."""
        order = self.restore(self.first)
        if order is None:
            return None
        tries = self._tries(order)
        self.accept(order.id)
        if tries > MAX_TRIES:
            reason = f"{tries - 1} starts ended before they carried it out; it is not tried again"
            self._reporter.order(order.id, "failed", reason=reason)
            message = f"the requested restore of {order.checkpoint} failed: {reason}"
            self._reporter.notice("error", "restore", message)
            return None
        return order

    def _tries(self, order: RestoreOrder) -> int:
        """Count the latest attempts, this one included, that began with the order and have not trained."""
        trained = {ending.attempt for ending in self._store.records(self._job, Ending) if ending.iterations > 0}
        tries = 0
        for attempt in reversed(self._store.records(self._job, Attempt)):
            if attempt.order != order.id or attempt.number in trained:
                break
            tries += 1
        return tries

    def _note_deadline(self, order: RestoreOrder | None) -> None:
        """Record the deadline of an order, counted from its arrival; the earliest one holds."""
        if order is not None and order.expires_in_seconds is not None:
            ends_at = self._clock() + order.expires_in_seconds
            self._ends_at[order.id] = min(ends_at, self._ends_at.get(order.id, ends_at))


def _orders_of(desired: Desired) -> Desired:
    """Return the orders alone, without server state, remaining times and what alerts keep."""
    order = desired.restore
    held = None if order is None else msgspec.structs.replace(order, expires_in_seconds=None)
    return msgspec.structs.replace(
        desired, latest_attempt=0, latest_lineage=0, restore=held, pins=None, alert_pins=()
    )
