"""The seam to `holdfast.store_share`: the share of a job in the write limit of a store.

That package is loaded once a server that knows limits of stores has answered. Until then nothing is limited.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.disabled import is_disabled
from holdfast.distributed.ranks import Ranks
from holdfast.pacing import Controller
from holdfast.protocol.store_shares import StoreReport
from holdfast.protocol.wire import CheckpointKind, Desired
from holdfast.save.draft import Draft
from holdfast.save.run import SETTLED, Run, RunState
from holdfast.store import Store
from holdfast.store.base import Pace
from holdfast.telemetry.reporter import Reporter

if TYPE_CHECKING:
    from holdfast.store_share.traffic import StoreTraffic


class StoreShares:
    """The share of a session's store, on rank 0; other ranks get their part of it with each checkpoint."""

    def __init__(self, store: Store, ranks: Ranks, reporter: Reporter, controller: Controller) -> None:
        self._store, self._ranks, self._reporter, self._controller = store, ranks, reporter, controller
        self._traffic: StoreTraffic | None = None
        self.has_limited = False
        """Whether checkpoints of this attempt were written at a limited rate: the last one is faster."""

    def follow(self, desired: Desired) -> None:
        """Take over the shares of a desired state."""
        if desired.shares is None or not self._ranks.leads or is_disabled("store-shares"):
            return
        if self._traffic is None:
            try:
                from holdfast.store_share.traffic import StoreTraffic
            except ImportError:  # the package was removed; what else the desired state says still applies
                return
            self._traffic = StoreTraffic(self._store, self._reporter, self._controller, self._ranks.world_size)
        self._traffic.follow(desired.shares)

    def may_begin(self) -> bool:
        """Return whether a checkpoint that is due may begin. Asked on rank 0."""
        return self._traffic is None or self._traffic.may_begin()

    def rank_rate(self, kind: CheckpointKind) -> float:
        """Bytes per second that each rank may write of a checkpoint that begins; 0 without a limit."""
        rate = 0.0 if self._traffic is None else self._traffic.rank_rate(kind)
        self.has_limited = self.has_limited or rate > 0
        return rate

    def pace(self, run: Run, draft: Draft) -> Pace | None:
        """Return the rate limiter of a write; `draft` has this rank's part of the share."""
        if self._traffic is not None:
            return self._traffic.pace(run, draft.kind)
        if not draft.bytes_per_second:
            return None
        try:
            from holdfast.store_share.limiter import RateLimit
        except ImportError:
            return None
        limit = RateLimit(lambda: draft.bytes_per_second)
        limit.restart()
        return lambda size_bytes: limit.take(size_bytes, lambda: run.is_urgent)

    def run_changed(self, run: Run, state: RunState) -> None:
        """Follow a checkpoint from its copy to its end."""
        if (traffic := self._traffic) is None:
            return
        if state is RunState.COPYING:
            traffic.begin(run)
        elif state in SETTLED:
            traffic.end(run, run.result.written_bytes)
        elif state is RunState.WRITING:
            traffic.report()

    def sample(self) -> StoreReport | None:
        """Return a report of the store, if one is due; for the thread that sends."""
        return None if self._traffic is None else self._traffic.sample()
