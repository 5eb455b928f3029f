"""Responses on stores, the writes of jobs to them, and the limits that operators set."""

from __future__ import annotations

from typing import Annotated

import msgspec

from holdfast.units import parse_positive_seconds, parse_rate

MAX_TARGET = 500
"""Most characters of the address that a limit is for."""
MAX_WRITERS = 1000


class StoreLimit(msgspec.Struct, kw_only=True, frozen=True):
    """A limit for what all jobs together write to a store, or to all stores below an address."""

    target: str
    """Id of the store, or the address."""
    bytes_per_second: float
    writers: int
    """Most scheduled checkpoints that are written at the same time."""
    fallback_bytes_per_second: float | None
    """Rate of each job without contact with a server; `None`: its share by weight."""
    holds_seconds: float
    """Time without contact after which that applies."""
    who: str
    at: float


class NewStoreLimit(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A limit to set."""

    target: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_TARGET)]
    limit: float | str
    """Bytes per second, or text such as "200MB/s"."""
    writers: Annotated[int, msgspec.Meta(ge=1, le=MAX_WRITERS)] = 4
    fallback: float | str | None = None
    """As `limit`, for each job without contact with a server; `None`: its share by weight."""
    holds: float | str = 60.0
    """Seconds without contact after which that applies, or text such as "2min"."""

    def rates(self) -> tuple[float, float | None, float]:
        """Return limit and fallback in bytes per second, and the time in seconds. ValueError: one is not valid."""
        fallback = None if self.fallback is None else parse_rate(_text(self.fallback), "fallback")
        holds = parse_positive_seconds(_text(self.holds), "holds")
        return parse_rate(_text(self.limit), "limit"), fallback, holds


class NewStoreWeight(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A job's share of a limit, relative to others with weight 1."""

    job: str
    weight: Annotated[float, msgspec.Meta(ge=0.01, le=100.0)]


class StoreWriter(msgspec.Struct, kw_only=True, frozen=True):
    """The writes of a job to a store."""

    job: str
    address: str
    """Address of the store as this job uses it."""
    is_active: bool
    """Whether the job reports now: only such jobs have a share."""
    written_bytes: int
    """By all attempts that reported it."""
    bytes_per_second: float | None
    """Rate now; `None` when it writes nothing."""
    waiting_bytes: int
    """Bytes of checkpoints that are copied but not durable yet."""
    checkpoint_bytes: int
    waits_since: float | None
    """Time since which a checkpoint that is due waits for its start."""
    weight: float
    share_bytes_per_second: float | None
    """Fair share on average, by need and weight; `None` without a limit."""
    rate_limit: float | None
    """Most bytes per second of its write now; `None` without a limit."""


class StoreSummary(msgspec.Struct, kw_only=True, frozen=True):
    """A store, with the sums of all jobs that write to it."""

    id: str
    address: str
    """As the last report has it."""
    host: str
    """Host of the last report."""
    free_bytes: int | None
    """Newest measurement; `None` if unknown, as for an object store."""
    total_bytes: int | None
    free_at: float | None
    """Time of that measurement."""
    at: float
    """Time of the last report."""
    limit: StoreLimit | None
    bytes_per_second: float
    """Rate of all jobs now."""
    waiting_bytes: int
    written_bytes: int
    active_writers: int
    """Number of jobs that report the store now, also of those that you may not see."""

    @property
    def load(self) -> float | None:
        """Rate of all jobs now as a share of the limit; `None` without a limit."""
        return None if self.limit is None else self.bytes_per_second / self.limit.bytes_per_second


class StoreInfo(StoreSummary, kw_only=True, frozen=True):
    """A store, and the jobs that write to it, those that write most first."""

    writers: list[StoreWriter]
    """Jobs that you may see."""
    hidden_writers: int
    """Number of other jobs; what they write is part of the sums."""


class StoreList(msgspec.Struct, kw_only=True, frozen=True):
    """One page of the stores that match."""

    stores: list[StoreSummary]
    page: int
    """Page number from 1; the last page, if a later one was requested."""
    pages: int
    size: int
    """Maximum number of stores per page."""
    total: int
    """Number of stores on all pages."""


def _text(value: float | str) -> str:
    return f"{value:.15g}" if isinstance(value, int | float) else value
