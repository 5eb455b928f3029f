"""The memory tier of a session: arenas that outlive its process, and what an attempt before it left in some.

All ranks of a job that run under one supervisor have it together, or none of them has: what one rank has kept is
of no use without the others.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec

from holdfast.checkpoint import restore
from holdfast.checkpoint.restore import Loaded, Regions
from holdfast.distributed.ranks import Ranks
from holdfast.errors import DamagedCheckpoint
from holdfast.format import manifest as fmt
from holdfast.memory_tier.complete_snapshot import CompleteSnapshot, complete, sealed_in
from holdfast.persist.completion_marker import mapped, read_seal, seals_of, verify
from holdfast.protocol.messages import parse_checkpoint_id
from holdfast.snapshot.checkpoint_run import CopyResult, RunRequest, SnapshotContents
from holdfast.snapshot.host_buffers import Arena, punch
from holdfast.snapshot.shared_buffers import SharedBuffer, claim, slots_in
from holdfast.store import Attempt, Lineage, Store
from holdfast.system import supervisor_channel
from holdfast.telemetry.reporter import Reporter

CODE = "memory"
"""Of its notices."""
_MACHINE = Path("/proc/sys/kernel/random/boot_id")


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that lies in memory, as rank 0 tells the others of it."""

    id: str
    numbers: list[int]
    """Of the slots that it lies in, by rank."""


class _Claimed(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank has of the memory that supervisors hold."""

    supervisor: str | None
    """Which one it runs under that holds any."""
    has_all: bool
    """As many slots as it wants."""


class MemoryTier:
    """Empty where no supervisor holds memory for this process; then snapshots lie in memory of its own.

    Args:
        slots: how many snapshots may be in flight.
    """

    def __init__(self, job: str, uid: str, slots: int, ranks: Ranks, reporter: Reporter) -> None:
        self._job, self._uid, self._ranks, self._reporter = job, uid, ranks, reporter
        self._untold: str | None = None
        """Why there is none, though a supervisor would hold it."""
        self._before: supervisor_channel.Trained | None = None
        """The attempt that was the supervisor's last, and has left what there is."""
        self._announced: set[str] = set()
        """The uids of all attempts of that supervisor: one may have died before it had said who it is."""
        self._found: list[CompleteSnapshot] = []
        self._loaded: CompleteSnapshot | None = None
        self._folder = _supervisor()
        claimed = self._claim(slots)
        if self._folder is not None:
            self._before = supervisor_channel.introduced(self._folder)
            self._announced = supervisor_channel.announced(self._folder) - {uid}
            self._found = sealed_in(self._folder, job)
        self.arenas = [Arena(slot, self._fall_back) for slot in claimed]
        self.arenas += [Arena() for _ in range(slots - len(claimed))]

    def candidates(self, store: Store, durable: Sequence[tuple[str, bool]]) -> list[Found]:
        """What may be gone on from rather than from the checkpoints that are `durable` (as `restore.candidates`
        has them), best first: of the current lineage, and none older than the newest of them.

        Nothing where another attempt has begun since: it has gone on from somewhere else. Nor what an attempt has
        left that this store does not know: it is of another job by that name; nor what another number of ranks
        has. OSError of the store. Of several ranks, rank 0 asks.
        """
        if self._before is None or not self._found or not (lineages := store.records(self._job, Lineage)):
            return []
        others = [attempt.uid for attempt in store.records(self._job, Attempt) if attempt.uid != self._uid]
        if not others or others[-1] not in {self._before.uid, *self._announced}:
            return []
        newest = next(
            (parse_checkpoint_id(checkpoint)[::-1] for checkpoint, continues in durable if continues), (0, 0)
        )
        here = {arena.slot.number for arena in self.arenas if arena.slot is not None}
        return [
            Found(id=sealed.task.id, numbers=sealed.numbers)
            for sealed in self._found
            if sealed.numbers[0] in here
            and len(sealed.seals) == self._ranks.world_size
            and sealed.task.origin.uid in others
            and sealed.place >= newest
            and sealed.place[0] == lineages[-1].number
        ]

    @property
    def may_have(self) -> bool:
        """An attempt before this one may have left something; rank 0 knows."""
        return bool(self._found) or self._ranks.world_size > 1

    def load(self, found: Found, regions: Regions | None) -> Loaded:
        """What this rank needs of it, verified where it lies. To be put in place on all ranks before the next
        snapshot begins on any.

        Raises:
            DamagedCheckpoint: the bytes are not those that were sealed.
            HoldfastError: the parts of the ranks do not belong together.
            OSError: the memory cannot be opened.
        """
        folder, rank = self._folder, self._ranks.rank
        if folder is None:
            raise DamagedCheckpoint("memory", "no supervisor holds any for this rank")
        sealed = _sealed(folder, found)
        own, arena = sealed.seals[rank], self._arena(sealed)
        arena.adopt(own.size_bytes)
        verify(own, arena.bytes(own.size_bytes))
        others = {seal.part.file.name: seal for seal in sealed.seals if seal is not own}

        def payload(file: fmt.File, names: Collection[str]) -> memoryview:
            if (seal := others.get(file.name)) is None:
                return arena.bytes(own.size_bytes)
            with mapped(SharedBuffer(folder, seal.number), seal.size_bytes, private=True) as theirs:
                verify(seal, theirs, only=names)
                return theirs

        loaded = restore.in_memory(sealed.manifest(), payload, rank=rank, regions=regions)
        self._loaded = sealed
        return loaded

    def is_unsaved(self, committed: Sequence[str]) -> bool:
        """Something was loaded that is not among the checkpoints `committed`."""
        return self._loaded is not None and self._loaded.task.id not in committed

    @property
    def parent(self) -> str | None:
        """The durable checkpoint before what was loaded."""
        return self._loaded.task.origin.parent if self._loaded is not None else None

    def survivor(
        self, *, number: int, attempt: int, uid: str, damaged: Collection[str]
    ) -> tuple[RunRequest, SnapshotContents, CopyResult]:
        """This rank's part of what was loaded, to be persisted by this attempt, as the one before it had it."""
        assert self._loaded is not None
        task = self._loaded.seals[self._ranks.rank].task
        contents = SnapshotContents(
            arena=self._arena(self._loaded),
            trees=task.state,
            slots=task.slots,
            views=task.views,
            shards=task.shards,
            own=task.own,
            alike=task.alike,
        )
        origin = msgspec.structs.replace(
            task.origin, attempt=attempt, uid=uid, place=None, replaces=task.id in damaged, bytes_per_second=None
        )
        request = RunRequest(
            iteration=task.iteration,
            lineage=task.lineage,
            kind=task.kind,
            origin=origin,
            number=number,
            fingerprint=task.fingerprint,
            started_at=task.created_at,
            survived=True,
        )
        return request, contents, CopyResult(seconds=task.timings.get("snapshot_seconds", 0.0))

    def tell(self, committed: Sequence[str]) -> None:
        """Where this attempt has gone on from, and why there is no memory tier where it could be missed."""
        if not self._ranks.leads:
            return
        if self._untold is not None:
            self._reporter.notice("info", CODE, self._untold)
            self._untold = None
        if self._loaded is None:
            return
        task, end = self._loaded.task, os.environ.get("HOLDFAST_PREVIOUS_EXIT")
        since = f"; the last attempt ended: {end}" if end else ""
        durable = "not durable yet, being written" if self.is_unsaved(committed) else "also durable"
        told = f"resumed from iteration {task.iteration:,} (kept in memory by `holdfast run`; {durable}){since}"
        self._reporter.notice("info", CODE, told)

    def damaged(self, found: Found, error: Exception) -> None:
        """It cannot be used, on whatever rank: the store is asked instead."""
        self._loaded = None
        if self._ranks.leads:
            iteration, _ = parse_checkpoint_id(found.id)
            told = f"the snapshot of iteration {iteration:,} in memory is not used: {error}"
            self._reporter.notice("warning", CODE, told)

    def tidy(self) -> None:
        """Give back what no rank has claimed, such as the parts of ranks that are no more.

        Once all attempts before this one are fenced: nothing of it can be committed any more.
        """
        if self._folder is None or not self._ranks.leads:
            return
        left = [seal.number for seal in seals_of(self._folder, self._job)]
        for slot in claim(self._folder, left, len(left), unsealed=False):
            with contextlib.suppress(OSError):
                slot.unseal()
                punch(slot)
            slot.release()

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

    def _claim(self, slots: int) -> list[SharedBuffer]:
        """Memory for this rank, where all of several have it of one supervisor."""
        claimed: list[SharedBuffer] = []
        rank, world_size = self._ranks.rank, self._ranks.world_size
        if self._folder is not None:
            seals = seals_of(self._folder, self._job)
            own = [seal.number for seal in seals if seal.task.origin.rank % world_size == rank]
            claimed = claim(self._folder, own, slots)
        if world_size == 1:
            return claimed
        supervisor = f"{_machine()} {self._folder}" if self._folder is not None else None
        ours = _Claimed(supervisor=supervisor, has_all=len(claimed) == slots)
        every = [msgspec.msgpack.decode(each, type=_Claimed) for each in self._gathered(ours)]
        self._untold = _reason(every, slots)
        if self._untold is None and supervisor is not None:
            return claimed
        for slot in claimed:
            slot.release()
        self._folder = None
        return []

    def _gathered(self, ours: _Claimed) -> list[bytes]:
        return self._ranks.gather(msgspec.msgpack.encode(ours))

    def _arena(self, sealed: CompleteSnapshot) -> Arena:
        """In which this rank's part lies."""
        number = sealed.seals[self._ranks.rank].number
        for arena in self.arenas:
            if arena.slot is not None and arena.slot.number == number:
                return arena
        raise DamagedCheckpoint("memory", f"slot {number} is not this rank's any more")

    def _fall_back(self, reason: str) -> None:
        told = f"snapshots do not outlive this process, the supervisor's memory has no room for them: {reason}"
        self._reporter.notice("warning", CODE, told)


def _supervisor() -> Path | None:
    """The folder of the one above this process, where it holds memory."""
    folder = os.environ.get(supervisor_channel.VARIABLE)
    return Path(folder) if folder and slots_in(Path(folder)) else None


def _sealed(folder: Path, found: Found) -> CompleteSnapshot:
    """As this rank finds it."""
    seals = complete(filter(None, (read_seal(SharedBuffer(folder, number)) for number in found.numbers)))
    if [(each.task.id, each.numbers) for each in seals] != [(found.id, found.numbers)]:
        raise DamagedCheckpoint("memory", f"{found.id} is not sealed by all ranks any more")
    return seals[0]


def _machine() -> str:
    """Folders of supervisors on two machines may have one name."""
    try:
        return _MACHINE.read_text().strip()
    except OSError:
        return ""


def _reason(every: Sequence[_Claimed], slots: int) -> str | None:
    """Why ranks that run under a supervisor have no memory of its; None where they have, or where none does."""
    supervisors = {each.supervisor for each in every}
    if supervisors == {None}:
        return None
    if len(supervisors) > 1:
        return (
            "a job whose ranks do not all run under one supervisor is not kept in memory: all "
            f"{len(every)} load from the store"
        )
    if not all(each.has_all for each in every):
        return (
            f"snapshots do not outlive this job: the supervisor holds no {len(every) * slots} pieces of memory "
            f"that are free, {slots} for each of {len(every)} ranks"
        )
    return None
