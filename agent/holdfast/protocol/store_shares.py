"""Reports of jobs about their stores, and the share of a limit that they get."""

from __future__ import annotations

from typing import Annotated

import msgspec

from holdfast.protocol.field_types import Count, MeasuredNumber, MeasuredSeconds, Text, Time


class StoreReport(msgspec.Struct, kw_only=True, omit_defaults=True, tag="store"):
    """The writes of all ranks to a store, reported by rank 0 after each change and every few seconds of a write.

    The id in its root identifies a store; without one, its address does, together with the host for a
    directory.
    """

    at: Time
    store: Annotated[str, msgspec.Meta(max_length=64)] = ""
    """Id in the root of the store; empty where it has none."""
    address: Text
    host: Text = ""
    free_bytes: Count | None = None
    """Free space of its file system, in one report after each measurement; `None`: unknown, or reported before."""
    total_bytes: Count | None = None
    """Size of that file system, with `free_bytes`."""
    written_bytes: Count = 0
    """Bytes that this attempt has handed to the store."""
    bytes_per_second: MeasuredNumber = None
    """Write rate since the previous report; `None` when nothing is written."""
    waiting_bytes: Count = 0
    """Bytes of checkpoints that are copied but not durable yet."""
    checkpoint_bytes: Count = 0
    """Bytes of the newest checkpoint that became durable, or of the one being written before there is one."""
    interval_seconds: MeasuredSeconds = None
    """Time between two checkpoints as the policy wants them."""
    writing: bool = False
    """A checkpoint is being written."""
    wants: Count = 0
    """Number of the newest request for a start of a checkpoint, which waits for the server."""
    started: Count = 0
    """Number of the last of these requests whose checkpoint has begun."""


class StoreShare(msgspec.Struct, kw_only=True, frozen=True):
    """A job's share of an operator's limit for a store. Scheduled checkpoints follow it."""

    address: str
    """Address of the store, as the job reported it."""
    bytes_per_second: float
    """Highest write rate of the job, all ranks together."""
    granted: Count = 0
    """The newest request for a start, `StoreReport.wants`, that may begin now."""
    holds_seconds: float = 60.0
    """Time for which the share holds without an answer of the server; then the fallback applies."""
    fallback_bytes_per_second: float
    longest_wait_seconds: float
    """Time after which a checkpoint begins although its request was not granted."""
