"""What the memory of this host holds, for reports to the server. Does not import torch."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from holdfast.format import manifest as fmt
from holdfast.protocol.field_types import HeldSnapshot
from holdfast.protocol.ids import checkpoint_id
from holdfast.protocol.wire import MemoryReport
from holdfast.save.completion_marker import marked_content
from holdfast.save.shared_buffers import slots_in

LOOK_SECONDS = 2.0
"""Least time between two looks at the completion markers."""
REPEAT_SECONDS = 60.0
"""Time after which a report is repeated without a change: the server may not have stored the one before."""


class _HeldPart(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a `Draft` that say which part of which snapshot it is."""

    job: str
    iteration: int
    lineage: int
    attempt: int
    world_size: int
    uid: str = ""
    rank: int = 0
    folder: str | None = None

    @property
    def key(self) -> tuple[str, str, int]:
        """Identify the snapshot: parts of one have been begun in one folder, by one attempt."""
        begun = fmt.digest(f"{self.uid} {self.attempt} {self.folder}".encode())[:12]
        return checkpoint_id(self.iteration, self.lineage), begun, self.world_size


_parts = msgspec.msgpack.Decoder(_HeldPart)


class HeldSnapshots:
    """Reports the snapshots of a job in the memory of a supervisor. For the thread that sends reports."""

    def __init__(self, folder: Path, job: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._job, self._clock = folder, job, clock
        self._read: dict[Path, tuple[tuple[int, int], _HeldPart | None]] = {}
        """Parts by completion marker, each with the identity of the file that it was read from."""
        self._looked_at = self._reported_at = -float("inf")
        self._reported: list[HeldSnapshot] | None = None

    def sample(self) -> MemoryReport | None:
        """Return a report if what the memory holds has changed, or after a while. Never raises."""
        now = self._clock()
        if now - self._looked_at < LOOK_SECONDS:
            return None
        self._looked_at = now
        try:
            snapshots = self._snapshots()
        except OSError:  # the supervisor has ended: nothing is held, and the next report says more
            return None
        if snapshots == self._reported and now - self._reported_at < REPEAT_SECONDS:
            return None
        self._reported, self._reported_at = snapshots, now
        return MemoryReport(at=time.time(), host=platform.node(), snapshots=snapshots)

    def _snapshots(self) -> list[HeldSnapshot]:
        ranks: dict[tuple[str, str, int], set[int]] = {}
        for slot in slots_in(self._folder):
            part = self._part(slot.marker)
            if part is not None and part.job == self._job:
                ranks.setdefault(part.key, set()).add(part.rank)
        return [
            HeldSnapshot(id=checkpoint, origin=origin, world_size=world_size, ranks=sorted(held))
            for (checkpoint, origin, world_size), held in sorted(ranks.items())
        ]

    def _part(self, marker: Path) -> _HeldPart | None:
        """Return the part that a marker describes, which is read once."""
        try:
            found = marker.stat()
            identity = found.st_ino, found.st_mtime_ns
            known = self._read.get(marker)
            if known is None or known[0] != identity:
                content = marked_content(marker.read_bytes())
                self._read[marker] = known = identity, None if content is None else _parts.decode(content)
        except (OSError, msgspec.MsgspecError):  # the slot holds no complete snapshot
            self._read.pop(marker, None)
            return None
        return known[1]
