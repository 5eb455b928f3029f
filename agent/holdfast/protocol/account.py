"""The account: use of GPU time and storage, losses by cause, and the work that checkpoints saved."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from holdfast.protocol.analyses import Bucket

AccountWindow = Literal["24h", "7d", "30d"]
AccountKey = Literal["project", "owner", "label", "store", "job"]
"""Key by which rows are grouped. With `label`, a job counts in the row of each of its labels."""
LossCause = Literal["failures", "restarts", "checkpoints", "data", "ranks", "idle"]

LOSS_CAUSES: dict[LossCause, tuple[Bucket, ...]] = {
    "failures": ("lost",),
    "restarts": ("starting", "restoring"),
    "checkpoints": ("snapshot_wait", "checkpoint_slowdown"),
    "data": ("data_fetch",),
    "ranks": ("barrier",),
    "idle": ("down", "paused", "unexplained"),
}
"""Categories of the goodput by cause; with `productive` they are all of them."""
CAUSE_DEFINITIONS: dict[LossCause, str] = {
    "failures": "iterations that a crash or a restore discarded",
    "restarts": "from the start of an attempt to its first iteration, and restores in place",
    "checkpoints": "waits for snapshots, and iterations that checkpoints slowed down",
    "data": "waits for the next batch",
    "ranks": "gradient exchange, and waiting for other ranks",
    "idle": "no attempt for up to an hour after a failure, pauses, and time without iterations",
}
SAVED_RULE = (
    "Saved is the work that a failed attempt did after its last end of an epoch and the next one did not repeat: "
    "of an epoch: a checkpoint at the end of each epoch would have lost it. A failure counts where the loader "
    "knows the length of an epoch"
)
IDLE_RULE = (
    "After an attempt that did not end as planned, its GPUs count as idle until the next attempt, for at most an "
    "hour: the server does not know whether they were free"
)


def money(amount: float, currency: str) -> str:
    """Format an amount of money: `1,204.50 EUR`."""
    figure = f"{amount:,.0f}" if abs(amount) >= 10_000 else f"{amount:,.2f}"
    return f"{figure} {currency}".rstrip()


class AccountRow(Struct, kw_only=True, frozen=True):
    """Sums over the jobs of a row. GPU-hours are measured times multiplied by the number of ranks."""

    name: str
    """Project, owner, `label: value`, address of the store, or job; empty if it has none."""
    jobs: int
    gpu_hours: float
    productive_gpu_hours: float
    lost_gpu_hours: dict[LossCause, float]
    categories: dict[Bucket, float]
    """GPU-hours by category of the goodput; they add up to `gpu_hours`."""
    failures: int
    saved_gpu_hours: float
    """Estimate: see `SAVED_RULE`."""
    uncompared_failures: int
    """Number of failures that saved an unknown time, since the length of an epoch is unknown."""
    unsaved_gpu_hours: float
    """Work that a crash now would lose, of jobs that have not ended."""
    written_bytes: int
    """Size of the checkpoints that became durable in the window, without files of earlier ones."""
    stored_bytes: int
    """Size of the checkpoints in the store now, without those of deleted jobs."""
    cost: float | None = None
    """Price of `gpu_hours`; `None` without a price."""
    lost_cost: float | None = None
    saved_cost: float | None = None
    stored_cost: float | None = None
    """Price of `stored_bytes` for a month."""

    @property
    def lost(self) -> float:
        """GPU-hours that did not advance training."""
        return self.gpu_hours - self.productive_gpu_hours


class AccountStore(Struct, kw_only=True, frozen=True):
    """Checkpoints of jobs in one store."""

    store: str
    """Its address, as the last report has it; empty if unknown."""
    id: str | None
    """Id of the store; `None` for one that no agent has reported."""
    host: str
    """Host of the last report, which has the directory at that address; empty for an object store."""
    jobs: int
    stored_bytes: int
    is_estimate: bool
    """Whether checkpoints share files in a way that the server does not know."""
    unsized_checkpoints: int
    """Number of checkpoints of unknown size, which are not in `stored_bytes`."""
    written_bytes: int
    written_bytes_per_hour: float
    """Since the first hour of `24h`, or the first day of a longer window, that has a checkpoint."""
    free_bytes: int | None
    """Free space at `free_at`; `None` if the store does not say."""
    total_bytes: int | None
    """Size of its file system."""
    free_at: float | None
    days_until_full: float | None
    """Estimate from the free space of the last days; `None` if unknown, or if it does not shrink."""
    stored_cost: float | None = None
    """Price of `stored_bytes` for a month; `None` without a price."""

    @property
    def seconds_until_full(self) -> float | None:
        return None if self.days_until_full is None else self.days_until_full * 86400


class Account(Struct, kw_only=True, frozen=True):
    """The account of a window."""

    window: AccountWindow
    by: AccountKey
    begins_at: float
    """A whole hour for `24h`, a whole day in UTC for longer windows."""
    ends_at: float
    accounted_at: float | None
    """Up to when hours are summed; `None` before the first sum."""
    total: AccountRow
    rows: list[AccountRow]
    """Those with the most lost GPU-hours first."""
    rows_total: int
    """Number of all rows."""
    stores: list[AccountStore]
    """Those with the most bytes first."""
    gpu_hour_price: float | None = None
    tb_month_price: float | None = None
    currency: str = ""
