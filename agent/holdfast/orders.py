"""What operators want of this job, held against what it already did."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from holdfast.pacing import Settings, find_policy
from holdfast.protocol import Desired, RestoreOrder
from holdfast.reports import Reporter
from holdfast.store import Store


class Orders:
    """Follows the desired state. Every method but `arrived` is for the training thread, between iterations.

    Orders come as state, not as messages: a newer version replaces all before it, and the same one seen
    twice changes nothing. A restore is carried out once: the lineage it begins names it, durably, before
    anything is touched.
    """

    def __init__(self, store: Store, job: str, reporter: Reporter, base: Settings) -> None:
        self._store, self._job, self._reporter = store, job, reporter
        self.base = base
        """What holds where no operator says otherwise."""
        self.first = Desired()
        """As it was when this attempt started."""
        self.attempt = 0
        self.pauses = 0
        self._seen = self._before = Desired()
        self._answered: set[str] = set()

    def start(self, first: Desired | None, attempt: int) -> None:
        self.first, self.attempt = first or Desired(), attempt
        # a click from before this attempt is not for it; a restore order is
        self._seen = Desired(
            checkpoint_request=self.first.checkpoint_request, probe_request=self.first.probe_request
        )

    def arrived(self, desired: Desired) -> None:
        """Called by the link's thread: say that an order got here, well before the boundary that acts on it."""
        if desired.restore is not None and desired.restore.id not in self._answered:
            self._reporter.order(desired.restore.id, "delivered")

    def settings(self) -> Settings:
        """Operator's order > argument > environment > default."""
        seen, base = self._seen, self.base
        policy = seen.policy or base.policy
        try:
            find_policy(policy)
        except ValueError as error:
            self._reporter.notice("warning", "policy", f"{error}; {base.policy} stays")
            policy = base.policy
        return replace(
            base,
            budget=seen.budget if seen.budget is not None else base.budget,
            policy=policy,
            every=seen.every if seen.every is not None else base.every,
            paused=seen.paused or self.pauses > 0,
        )

    def news(self, desired: Desired | None) -> bool:
        """Whether `desired` says something not acted on yet; from now on it counts as acted on."""
        # compared whole: the version of a server whose data was deleted starts again and may come to the same
        if desired is None or _orders_of(desired) == _orders_of(self._seen):
            return False
        self._before, self._seen = self._seen, desired
        return True

    @property
    def checkpoint_requested(self) -> bool:
        """Somebody clicked since the version before; ask right after `news`."""
        return self._seen.checkpoint_request not in (0, self._before.checkpoint_request)

    @property
    def probe_requested(self) -> bool:
        """The same of a probe of the data."""
        return self._seen.probe_request not in (0, self._before.probe_request)

    def restore(self, desired: Desired | None = None) -> RestoreOrder | None:
        """The open restore order, if it is for this attempt and was not carried out before."""
        order = (desired or self._seen).restore
        if order is None or order.id in self._answered:
            return None
        if self.attempt and order.fence > self.attempt:
            return None
        self._answered.add(order.id)
        if any(lineage.order == order.id for lineage in self._store.lineages(self._job)):
            self._reporter.order(order.id, "restored", reason="carried out before the trainer was restarted")
            return None
        return order

    def restore_at_start(self) -> RestoreOrder | None:
        """The one that was open when this attempt started. After an OSError of the store it still is."""
        try:
            return self.restore(self.first)
        except OSError:
            self.reopen()
            raise

    def reopen(self) -> None:
        """Forget that the order of the start was looked at: the next boundary takes it for a new one."""
        if self.first.restore is not None:
            self._answered.discard(self.first.restore.id)


def _orders_of(desired: Desired) -> Desired:
    """Without what the server has seen, which is no order."""
    return msgspec.structs.replace(desired, latest_attempt=0, latest_lineage=0)
