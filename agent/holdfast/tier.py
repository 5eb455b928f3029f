"""The memory tier of a session: arenas that outlive its process, and what an attempt before it left in one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from holdfast import restore, supervision
from holdfast.arena import Arena
from holdfast.persist.sealing import Seal, read_seal, seals_of, verify
from holdfast.persist.task import Origin
from holdfast.persist.writing import manifest_of
from holdfast.protocol import parse_checkpoint_id
from holdfast.reports import Reporter
from holdfast.restore import Loaded
from holdfast.shards import together
from holdfast.slots import claim, slots_in
from holdfast.snapshot import Snapshot
from holdfast.store import Lineage, Store

CODE = "memory"
"""Of its notices."""


class Tier:
    """Empty where no supervisor holds memory for this process; then snapshots lie in memory of its own.

    Args:
        slots: how many snapshots may be in flight.
    """

    def __init__(self, job: str, uid: str, slots: int, world_size: int, reporter: Reporter) -> None:
        self._job, self._uid, self._reporter = job, uid, reporter
        self._untold: str | None = None
        """Why there is none, though a supervisor would hold it."""
        self._before: supervision.Trained | None = None
        """The attempt that was the supervisor's last, and has left what there is."""
        self._announced: set[str] = set()
        """The uids of all attempts of that supervisor: one may have died before it had said who it is."""
        self._seals: list[Seal] = []
        self._loaded: Seal | None = None
        claimed = []
        folder = os.environ.get(supervision.VARIABLE)
        if folder and slots_in(Path(folder)):
            if world_size > 1:
                self._untold = (
                    f"a job of several ranks is not kept in memory: all {world_size} load from the store"
                )
            else:
                self._before = supervision.introduced(Path(folder))
                self._announced = supervision.announced(Path(folder)) - {uid}
                self._seals = seals_of(Path(folder), job)
                claimed = claim(Path(folder), [seal.number for seal in self._seals], slots)
        self.arenas = [Arena(slot, self._fall_back) for slot in claimed]
        self.arenas += [Arena() for _ in range(slots - len(claimed))]

    def candidates(
        self, store: Store, durable: Sequence[tuple[str, bool]], lineages: Sequence[Lineage]
    ) -> list[Seal]:
        """What may be gone on from rather than from the checkpoints that are `durable` (as `restore.candidates`
        has them), best first: of the current lineage, and none older than the newest of them.

        Nothing where another attempt has begun since: it has gone on from somewhere else. Nor what an attempt has
        left that this store does not know: it is of another job by that name. OSError of the store.
        """
        if self._before is None or not self._seals or not lineages:
            return []
        others = [attempt.uid for attempt in store.attempts(self._job) if attempt.uid != self._uid]
        if not others or others[-1] not in {self._before.uid, *self._announced}:
            return []
        newest = next(
            (parse_checkpoint_id(checkpoint)[::-1] for checkpoint, continues in durable if continues), (0, 0)
        )
        here = {arena.slot.number for arena in self.arenas if arena.slot is not None}
        ours = [seal for seal in self._seals if seal.number in here and seal.task.origin.uid in others]
        found = [(parse_checkpoint_id(seal.task.id)[::-1], seal) for seal in ours]
        return [seal for place, seal in found if place >= newest and place[0] == lineages[-1].number]

    @property
    def found(self) -> bool:
        """An attempt before this one has left something."""
        return bool(self._seals)

    def load(self, seal: Seal) -> Loaded:
        """What it seals, verified where it lies. To be put in place before the next snapshot begins.

        Raises:
            DamagedCheckpoint: the bytes are not those that were sealed.
            OSError: the memory cannot be opened.
        """
        arena = self._arena(seal)
        arena.adopt(seal.size_bytes)
        payload = arena.bytes(seal.size_bytes)
        verify(seal, payload)
        self._loaded = seal
        return restore.in_memory(manifest_of(seal.task, together([seal.part], 1), 0.0), payload)

    def unsaved(self, committed: Sequence[str]) -> tuple[Snapshot, Origin] | None:
        """What was loaded, if it is not among the checkpoints `committed`, to be persisted by this attempt; and
        what the attempt that took it said of its origin."""
        if (seal := self._loaded) is None or seal.task.id in committed:
            return None
        task = seal.task
        snapshot = Snapshot(
            *(task.iteration, task.lineage, task.kind, task.state, task.slots, task.views),
            self._arena(seal),
            list,
            started_at=task.created_at,
            survived=True,
            seconds=task.timings.get("snapshot_seconds", 0.0),
        )
        snapshot.safe.set()
        snapshot.copied.set()
        return snapshot, task.origin

    def tell(self, committed: Sequence[str]) -> None:
        """Where this attempt has gone on from, and why there is no memory tier where it could be missed."""
        if self._untold is not None:
            self._reporter.notice("info", CODE, self._untold)
            self._untold = None
        if (seal := self._loaded) is None:
            return
        end = os.environ.get("HOLDFAST_PREVIOUS_EXIT")
        since = f", whose last attempt ended ({end})" if end else ""
        durable = "it is durable as well" if seal.task.id in committed else "it is being made durable"
        told = f"goes on from iteration {seal.task.iteration:,} out of the memory of this job{since}; {durable}"
        self._reporter.notice("info", CODE, told)

    def damaged(self, seal: Seal, error: Exception) -> None:
        """It cannot be used: the store is asked instead."""
        self._seals.remove(seal)
        self._loaded = None
        told = f"the snapshot of iteration {seal.task.iteration:,} in memory is not used: {error}"
        self._reporter.notice("warning", CODE, told)

    def close(self, head: str | None) -> None:
        """Let others have the memory; what no checkpoint up to the durable `head` holds stays for a rescue."""
        saved = parse_checkpoint_id(head)[0] if head is not None else 0
        for arena in self.arenas:
            if (slot := arena.slot) is None:
                continue
            seal = read_seal(slot)
            if seal is None or seal.task.iteration <= saved:
                slot.unseal()
                arena.forget()
            slot.release()

    def release(self) -> None:
        """As `close`, but everything stays: training did not end as it should."""
        for arena in self.arenas:
            if arena.slot is not None:
                arena.slot.release()

    def _arena(self, seal: Seal) -> Arena:
        return next(arena for arena in self.arenas if arena.slot is not None and arena.slot.number == seal.number)

    def _fall_back(self, reason: str) -> None:
        told = f"snapshots do not outlive this process, the supervisor's memory has no room for them: {reason}"
        self._reporter.notice("warning", CODE, told)
