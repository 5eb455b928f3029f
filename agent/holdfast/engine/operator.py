"""Settings and orders of operators: received while training continues, and applied at a boundary."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from holdfast.checkpoint.retention_queue import Protector, RetentionQueue
from holdfast.engine.coordination import Requests
from holdfast.engine.training import Training
from holdfast.pacing import Controller, PacingSettings, interval_time, parse_budget, parse_every, parse_policy
from holdfast.pacing.settings import parse_unsaved_work, parse_write_budget
from holdfast.protocol.orders import OnTrouble, TrainingOrder, parse_on_trouble
from holdfast.protocol.values import ValueChange
from holdfast.protocol.wire import Desired, RestoreMode, RestoreOrder, VerifyRequest
from holdfast.retention import Retention, parse_retention
from holdfast.save.history import History
from holdfast.save.store_shares import StoreShares
from holdfast.store import Attempt, Ending, Lineage
from holdfast.system import supervisor_channel
from holdfast.telemetry.reporter import Reporter
from holdfast.units import FixedInterval

if TYPE_CHECKING:
    from holdfast.engine.verification_queue import Verifier

MAX_WITHHELD_SECONDS = 86400.0
"""Longest time that server settings can suppress checkpoints: then one is taken all the same."""
MAX_TRIES = 3
"""Starts that may end before they carry out one order; then the order has failed."""

MODE_CHECK_SECONDS = 5.0
"""Interval at which the kind of loop is checked; a loop usually shows it in its first iteration."""

NO_RULE = OnTrouble()

T = TypeVar("T")


class RestoreModeReport:
    """Reports how a restore would be carried out, and by which rule, first and whenever it changes."""

    def __init__(self, training: Training, reporter: Reporter) -> None:
        self._training, self._reporter = training, reporter
        self._reported: tuple[RestoreMode, OnTrouble, int] | None = None
        self._start_seconds: float | None = None
        self._check_at = 0.0

    def update(self, on_trouble: OnTrouble) -> None:
        """Report it at a boundary, if it is time to check and it has changed."""
        now = time.monotonic()
        if not self._reporter.has_server or now < self._check_at:
            return
        self._check_at = now + MODE_CHECK_SECONDS
        reason = self._training.obstacle_to_restore()
        way: RestoreMode = "relaunch" if supervisor_channel.is_supervised() else "next_start"
        mode = "in_place" if reason is None else way
        batches = self._training.counted.batches
        if (mode, on_trouble, batches) != self._reported:
            first = self._reported is None
            start_seconds = supervisor_channel.seconds_since_start() if first else self._start_seconds
            self._reported, self._start_seconds = (mode, on_trouble, batches), start_seconds
            self._reporter.restore_mode(mode, reason or "", start_seconds, str(on_trouble), batches)


class Operator:
    """Follows the desired state that operators edit.

    `receive` is for the polling thread: it protects and notes, and changes nothing of the training. `follow` acts
    at a boundary; it and the other methods are for the training thread, between iterations.

    Orders are state, not messages: a newer version replaces older ones, and the same version twice changes
    nothing. A restore is carried out once: the lineage that it begins names it durably before anything changes.
    An expired order is not carried out.
    """

    def __init__(
        self,
        history: History,
        retention: RetentionQueue,
        controller: Controller,
        reporter: Reporter,
        requests: Requests,
        script: PacingSettings,
        shares: StoreShares,
        *,
        rules: Retention,
        on_trouble: OnTrouble = NO_RULE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._history, self._retention, self._controller = history, retention, controller
        self._reporter, self._requests, self._clock = reporter, requests, clock
        self._shares = shares
        self._script, self._rules = script, rules
        """Settings of the script, for what no operator has set."""
        self._own_on_trouble = self.on_trouble = on_trouble
        """The rule about wrong losses: the script's, and the one in force."""
        self.first = Desired()
        """Desired state when this attempt started."""
        self._pauses = 0
        """Blocks of the script that take no checkpoints."""
        self._received: Desired | None = None
        """The newest desired state; the polling thread replaces it."""
        self._followed: Desired | None = None
        """The last one that a boundary compared."""
        self._seen = Desired()
        """The desired state in force."""
        self._answered: set[str] = set()
        """Orders that were decided on, or need no action."""
        self._withheld_reported = False
        self._ends_at: dict[str, float] = {}
        """Deadlines of orders, on the local clock."""
        self._verifier: Verifier | None = None
        """Made for the first request."""
        self._is_closed = False

    def start(self, first: Desired | None) -> None:
        """Begin with the desired state of the start, before the first one is received."""
        if first is None:
            return
        self.first = first
        # only orders survive the previous attempt, not other requests
        self._seen = Desired(
            checkpoint_request=first.checkpoint_request, probe_request=first.probe_request, training=first.training
        )
        self._note_deadline(first.restore)
        self._apply_at_once(first)
        self._retention.change(self._retention_rules(first))

    def receive(self, desired: Desired) -> None:
        """Protect what is ordered, note the rest for the next boundary, and report an order as delivered."""
        order = desired.restore
        self._note_deadline(order)
        self._apply_at_once(desired)
        self._received = desired
        if order is not None and order.id not in self._answered:
            self._reporter.order(order.id, "delivered")

    def follow(self) -> None:
        """Act on what was received since the last boundary."""
        desired = self._received
        if desired is None or desired is self._followed:
            return
        self._followed = desired
        # compared whole: the version of a server whose data was deleted starts again and may come to the same
        before, self._seen = self._seen, desired
        if _orders_of(desired) == _orders_of(before):
            return
        self._retention.change(self._retention_rules(desired))
        if desired.checkpoint_request not in (0, before.checkpoint_request):
            self._requests.checkpoint = True
        if desired.probe_request not in (0, before.probe_request):
            self._requests.probe = True
        self.on_trouble = self._parsed("on_trouble", parse_on_trouble, desired.on_trouble, self._own_on_trouble)
        self._apply_settings()
        self._reporter.applied(desired.version)

    def close(self) -> None:
        """Abandon a verification under way; the server repeats it at the next start."""
        self._is_closed = True
        if self._verifier is not None:
            self._verifier.close()

    def _apply_at_once(self, desired: Desired) -> None:
        """Apply what takes effect between two boundaries as well, on any thread."""
        self._retention.protect(Protector.ORDER, desired.restore.checkpoint if desired.restore else None)
        self._retention.follow(desired, self._history.attempt)
        self._verify(desired.verify)
        self._shares.follow(desired)

    def _verify(self, wanted: tuple[VerifyRequest, ...]) -> None:
        if self._verifier is None and wanted:
            from holdfast.engine.verification_queue import Verifier  # few jobs are asked for one

            self._verifier = Verifier(self._history, self._retention, self._reporter)
            if self._is_closed:  # meanwhile, on the training thread
                self._verifier.close()
        if self._verifier is not None:
            self._verifier.follow(wanted)

    # Settings

    def fix_interval(self, every: FixedInterval | None) -> None:
        """Have the script fix the interval from now on; `None`: leave it to the policy."""
        self._script = replace(self._script, every=every)
        self._apply_settings()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Take no scheduled checkpoints in the `with` block of the script."""
        self._pauses += 1
        self._apply_settings()
        try:
            yield
        finally:
            self._pauses -= 1
            self._apply_settings()

    def _apply_settings(self) -> None:
        self._controller.change(self.settings())
        self._reporter.report_interval(self._controller, changed=True)

    def settings(self) -> PacingSettings:
        """Return the settings in force: operator > argument > environment > default."""
        seen, base = self._seen, self._script
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
            paused=seen.paused or self._pauses > 0,
        )

    @property
    def value_changes(self) -> tuple[ValueChange, ...]:
        """The changes of values that operators want, oldest first."""
        return self._seen.values

    @property
    def withholds(self) -> bool:
        """Whether settings of operators, not the script's, may suppress checkpoints."""
        seen = self._seen
        settings = (seen.every, seen.interval_seconds, seen.budget, seen.policy, seen.write_bytes_per_second)
        has_settings = seen.paused or any(each is not None for each in settings)
        return has_settings and not self._pauses and not self._script.paused

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
        seen, own = self._seen, self._script.every
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

    def _retention_rules(self, desired: Desired) -> Retention:
        return self._parsed("retention", parse_retention, desired.retention, self._rules)

    # Orders about training

    @property
    def newest_training_order(self) -> str | None:
        """Id of the newest one, whether it was carried out or not."""
        return self._seen.training.id if self._seen.training is not None else None

    def training_order(self) -> TrainingOrder | None:
        """Return the newest one, until `accept` is called with its id."""
        order = self._seen.training
        return None if order is None or order.id in self._answered else order

    # Restore orders

    def reopen(self) -> None:
        """Reopen the order of the start, for the next boundary."""
        if self.first.restore is not None:
            self._answered.discard(self.first.restore.id)

    def restore(self, desired: Desired | None = None) -> RestoreOrder | None:
        """Return the open restore order, if it is for this attempt and was not carried out.

        It is returned again until `accept` is called with it.
        """
        order = (desired or self._seen).restore
        if order is None or order.id in self._answered:
            return None
        store, job, attempt = self._history.store, self._history.job, self._history.attempt
        if attempt and order.fence > attempt:
            return None
        try:
            lineages = store.records(job, Lineage)
        except OSError:
            # later boundaries must not wait for an unavailable store: the next start asks again
            if desired is None:
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
        store, job, tries = self._history.store, self._history.job, 0
        trained = {ending.attempt for ending in store.records(job, Ending) if ending.iterations > 0}
        for attempt in reversed(store.records(job, Attempt)):
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
        desired,
        latest_attempt=0,
        latest_lineage=0,
        restore=held,
        pins=None,
        alert_pins=(),
        shares=None,
        share_number=0,
    )
