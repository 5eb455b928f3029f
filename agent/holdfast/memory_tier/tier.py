"""The memory tier of a session: arenas that outlive its process, and snapshots of earlier attempts there.

Either all ranks of a job use it, under one supervisor, or none: one part is useless without the others.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from holdfast.checkpoint import restore
from holdfast.checkpoint.restore import LoadedCheckpoint, Localize, Regions
from holdfast.disabled import is_disabled
from holdfast.distributed.ranks import Ranks
from holdfast.errors import DamagedCheckpoint
from holdfast.format import manifest as fmt
from holdfast.protocol.ids import parse_checkpoint_id
from holdfast.save.completion_marker import has_other_version, mapped, markers_of, read_marker, verify
from holdfast.save.draft import Draft
from holdfast.save.host_buffers import Arena, free_slot_pages
from holdfast.save.run import RunListener
from holdfast.save.shared_buffers import SharedBuffer, claim, slots_in
from holdfast.store import Attempt, Lineage, Store
from holdfast.system import supervisor_channel, supervisor_files
from holdfast.telemetry.reporter import Reporter

if TYPE_CHECKING:
    from holdfast.memory_tier.complete_snapshot import CompleteSnapshot
    from holdfast.memory_tier.held_snapshots import HeldSnapshots

NOTICE_CODE = "memory"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class MemoryCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint in memory, as rank 0 describes it to the other ranks."""

    id: str
    numbers: list[int]
    """Slot numbers, by rank; empty if several hosts hold the parts."""
    folder: str = ""
    """Folder in the store in which its ranks began it, if several hosts hold the parts."""


class _Claimed(msgspec.Struct, frozen=True, kw_only=True):
    """The slots that a rank has claimed."""

    supervisor: str | None
    """Machine and folder of its supervisor; None if it has none that holds memory."""
    has_all: bool
    """It claimed one slot per snapshot in flight."""


@dataclass(frozen=True, slots=True)
class EarlierSnapshots:
    """What earlier attempts under the same supervisor have left in its memory."""

    previous: supervisor_channel.PublishedAttempt | None = None
    """The last attempt, which left the snapshots."""
    uids: Collection[str] = ()
    """Uids of all attempts, also of those that died before they published more."""
    snapshots: Sequence[CompleteSnapshot] = ()


class MemoryTier:
    """The arenas of a session, one per snapshot in flight; private memory without a supervisor that holds any."""

    sender: RunListener | None = None
    """Sends snapshots to other hosts, if this tier does."""

    def __init__(
        self,
        job: str,
        uid: str,
        ranks: Ranks,
        reporter: Reporter,
        *,
        folder: Path | None = None,
        slots: Sequence[SharedBuffer] = (),
        private: int = 0,
        unused_reason: str | None = None,
        earlier: EarlierSnapshots | None = None,
    ) -> None:
        """Use claimed slots; `open_memory_tier` claims them.

        Args:
            folder: that of the supervisor; `None` without one that holds memory for all ranks.
            private: number of further arenas, of private memory.
            unused_reason: why the tier, or a snapshot in it, is not used although there is a supervisor.
            earlier: what earlier attempts under the supervisor have left.
        """
        self._job, self._uid, self._ranks, self._reporter = job, uid, ranks, reporter
        self._folder, self._unreported = folder, unused_reason
        earlier = earlier or EarlierSnapshots()
        self._previous, self._published_uids, self._found = earlier.previous, earlier.uids, earlier.snapshots
        self._loaded: CompleteSnapshot | None = None
        self.arenas = [Arena(slot, self._fall_back) for slot in slots]
        self.arenas += [Arena() for _ in range(private)]

    def candidates(self, store: Store, durable: Sequence[tuple[str, bool]]) -> list[MemoryCheckpoint]:
        """Return snapshots to resume from instead of a durable checkpoint, best first. Called on rank 0.

        They belong to the current lineage and world size, and are at least as new as the newest durable one. None
        are returned if an attempt outside this supervisor has begun since, because it resumed from another
        checkpoint. Snapshots of attempts that the store does not know belong to another job of this name.

        `durable` are the checkpoints that `restore.candidates` yields. OSError when the store cannot be read.
        """
        if self._previous is None or not self._found:
            return []
        is_usable = self._usable(store, durable, {self._previous.uid, *self._published_uids})
        here = {arena.slot.number for arena in self.arenas if arena.slot is not None}
        return [
            MemoryCheckpoint(id=each.draft.id, numbers=each.numbers)
            for each in self._found
            if each.numbers[0] in here
            and len(each.markers) == self._ranks.world_size
            and is_usable(each.draft.uid, each.position)
        ]

    def _usable(
        self, store: Store, durable: Sequence[tuple[str, bool]], known: Collection[str]
    ) -> Callable[[str, tuple[int, int]], bool]:
        """Return what decides, by the uid of its attempt and its position, whether to resume from a snapshot.

        `known` are the uids of the attempts under the supervisors that hold snapshots.
        """
        lineages = store.records(self._job, Lineage)
        others = [attempt.uid for attempt in store.records(self._job, Attempt) if attempt.uid != self._uid]
        if not lineages or not others or others[-1] not in known:
            return lambda uid, position: False
        newest = next(
            (parse_checkpoint_id(checkpoint)[::-1] for checkpoint, continues in durable if continues), (0, 0)
        )
        current = lineages[-1].number
        return lambda uid, position: uid in others and position >= newest and position[0] == current

    @property
    def may_hold_snapshots(self) -> bool:
        """An earlier attempt may have left snapshots; only rank 0 knows for certain."""
        return bool(self._found) or self._ranks.world_size > 1

    def load(
        self, found: MemoryCheckpoint, regions: Regions | None, localize: Localize = lambda manifest: manifest
    ) -> LoadedCheckpoint:
        """Verify and load what this rank needs, as views of the shared memory.

        All ranks must apply it before any of them begins the next snapshot, which overwrites the memory.

        Raises:
            DamagedCheckpoint: the bytes do not match the completion marker.
            HoldfastError: the parts of the ranks do not belong to one checkpoint.
            OSError: the memory cannot be opened.
        """
        folder, rank = self._folder, self._ranks.rank
        if folder is None:
            raise DamagedCheckpoint("memory", "no supervisor holds memory for this rank")
        snapshot = _read_snapshot(folder, found)
        own, arena = snapshot.markers[rank], self._arena(snapshot)
        arena.adopt(own.draft.size_bytes)
        verify(own, arena.bytes(own.draft.size_bytes))
        others = {marker.draft.files[0].name: marker for marker in snapshot.markers if marker is not own}

        def payload(file: fmt.File, names: Collection[str]) -> memoryview:
            if (marker := others.get(file.name)) is None:
                return arena.bytes(own.draft.size_bytes)
            with mapped(SharedBuffer(folder, marker.number), marker.draft.size_bytes, private=True) as data:
                verify(marker, data, only=names)
                return data

        loaded = restore.load_from_memory(localize(snapshot.manifest()), payload, rank=rank, regions=regions)
        self._loaded = snapshot
        return loaded

    def is_unsaved(self, committed: Sequence[str]) -> bool:
        """Return whether the loaded snapshot is not among the checkpoints `committed`."""
        return self._loaded is not None and self._loaded.draft.id not in committed

    @property
    def is_sending(self) -> bool:
        """A snapshot is being sent to another host."""
        return False

    @property
    def is_receiving(self) -> bool:
        """A snapshot of another host is being received."""
        return False

    @property
    def parent(self) -> str | None:
        """The parent of the loaded snapshot."""
        return self._loaded.draft.parent if self._loaded is not None else None

    def survivor(self) -> tuple[Arena, Draft]:
        """Return this rank's part of the loaded snapshot, for this attempt to save: it is digested again."""
        assert self._loaded is not None
        draft = self._loaded.markers[self._ranks.rank].draft
        return self._arena(self._loaded), msgspec.structs.replace(draft, files=[], tensors=[])

    @property
    def _is_first_on_host(self) -> bool:
        """This rank reports for its host."""
        return self._ranks.leads

    def held_snapshots(self) -> HeldSnapshots | None:
        """Return what reports the snapshots in the memory of this host; None where another rank does."""
        if self._folder is None or not self._is_first_on_host:
            return None
        from holdfast.memory_tier.held_snapshots import HeldSnapshots

        return HeldSnapshots(self._folder, self._job)

    def report_start(self, committed: Sequence[str]) -> None:
        """Report a resume from memory, and why the tier is not used if there is a supervisor."""
        if not self._ranks.leads:
            return
        if self._unreported is not None:
            self._reporter.notice("info", NOTICE_CODE, self._unreported)
            self._unreported = None
        if self._loaded is None:
            return
        iteration, end = self._loaded.draft.iteration, os.environ.get("HOLDFAST_PREVIOUS_EXIT")
        since = f"; the last attempt ended: {end}" if end else ""
        durable = "not durable yet, being written" if self.is_unsaved(committed) else "also durable"
        message = f"resumed from iteration {iteration:,} (kept in memory by `holdfast run`; {durable}){since}"
        self._reporter.notice("info", NOTICE_CODE, message)

    def report_damaged(self, found: MemoryCheckpoint, error: Exception) -> None:
        """Report that a snapshot could not be loaded on some rank; the attempt loads from the store instead."""
        self._loaded = None
        if self._ranks.leads:
            iteration, _ = parse_checkpoint_id(found.id)
            message = f"the snapshot of iteration {iteration:,} in memory is not used: {error}"
            self._reporter.notice("warning", NOTICE_CODE, message)

    def free_unclaimed(self) -> None:
        """Free snapshots that no rank has claimed, once earlier attempts are fenced and cannot commit them."""
        if self._is_first_on_host:
            self._free_unclaimed_slots()

    def _free_unclaimed_slots(self) -> None:
        if self._folder is None:
            return
        marked = [marker.number for marker in markers_of(self._folder, self._job)]
        for slot in claim(self._folder, marked, len(marked), unmarked=False):
            with contextlib.suppress(OSError):
                slot.remove_marker()
                free_slot_pages(slot)
            slot.release()

    def close(self, head: str | None) -> None:
        """Release the slots, but keep snapshots newer than the durable `head` for a crash commit."""
        saved = parse_checkpoint_id(head)[0] if head is not None else 0
        for arena in self.arenas:
            if (slot := arena.slot) is None:
                continue
            marker = read_marker(slot)
            if marker is None or marker.draft.iteration <= saved:
                slot.remove_marker()
                arena.free_pages()
            slot.release()

    def release(self) -> None:
        """Release the slots and keep all snapshots, because training ended with an error."""
        for arena in self.arenas:
            if arena.slot is not None:
                arena.slot.release()

    def _arena(self, snapshot: CompleteSnapshot) -> Arena:
        """Return the arena that holds this rank's part."""
        number = snapshot.markers[self._ranks.rank].number
        for arena in self.arenas:
            if arena.slot is not None and arena.slot.number == number:
                return arena
        raise DamagedCheckpoint("memory", f"slot {number} is no longer claimed by this rank")

    def _fall_back(self, reason: str) -> None:
        message = f"snapshots will not survive a crash, because the supervisor has too little memory: {reason}"
        self._reporter.notice("warning", NOTICE_CODE, message)


def open_memory_tier(
    job: str, uid: str, max_in_flight: int, ranks: Ranks, reporter: Reporter, note: str | None = None
) -> MemoryTier:
    """Claim slots for this rank, and find what earlier attempts left. Collective over all ranks.

    `note` is what to report at the start if there is no reason why the tier is not used.
    """
    folder = supervisor_folder()
    slots, reason = _claim(folder, job, max_in_flight, ranks)
    if ranks.world_size > 1 and not slots:
        folder = None
    earlier: EarlierSnapshots | None = None
    if folder is not None:
        from holdfast.memory_tier.complete_snapshot import complete_snapshots_in  # only under a supervisor

        earlier = EarlierSnapshots(
            supervisor_files.published_attempt(folder),
            supervisor_files.published_uids(folder) - {uid},
            complete_snapshots_in(folder, job),
        )
        if reason is None and any(map(has_other_version, slots_in(folder))):
            reason = (
                "another version of Holdfast left snapshots in the supervisor's memory: they are kept and not "
                "used; the job resumes from the store"
            )
    private = max_in_flight - len(slots)
    return MemoryTier(
        job, uid, ranks, reporter,
        folder=folder, slots=slots, private=private, unused_reason=reason or note, earlier=earlier,
    )  # fmt: skip


def _claim(
    folder: Path | None, job: str, max_in_flight: int, ranks: Ranks
) -> tuple[list[SharedBuffer], str | None]:
    """Claim slots for this rank; return them, and why none are used. None, unless all ranks have enough of them
    from one supervisor."""
    claimed: list[SharedBuffer] = []
    rank, world_size = ranks.rank, ranks.world_size
    if folder is not None:
        markers = markers_of(folder, job)
        own = [marker.number for marker in markers if marker.draft.rank % world_size == rank]
        claimed = claim(folder, own, max_in_flight)
    if world_size == 1:
        return claimed, None
    supervisor = f"{machine_id()} {folder}" if folder is not None else None
    result = _Claimed(supervisor=supervisor, has_all=len(claimed) == max_in_flight)
    gathered = ranks.gather(msgspec.msgpack.encode(result))
    by_rank = [msgspec.msgpack.decode(each, type=_Claimed) for each in gathered]
    reason = _unused_reason(by_rank, max_in_flight)
    if reason is None and supervisor is not None:
        return claimed, None
    for slot in claimed:
        slot.release()
    return [], reason


def supervisor_folder() -> Path | None:
    """Return the folder of this process's supervisor; None if there is none that holds memory."""
    folder = os.environ.get(supervisor_channel.VARIABLE)
    return Path(folder) if folder and not is_disabled("memory-tier") and slots_in(Path(folder)) else None


def _read_snapshot(folder: Path, found: MemoryCheckpoint) -> CompleteSnapshot:
    """Read the completion markers of all ranks again. DamagedCheckpoint when they have changed."""
    from holdfast.memory_tier.complete_snapshot import complete

    snapshots = complete(filter(None, (read_marker(SharedBuffer(folder, number)) for number in found.numbers)))
    if [(each.draft.id, each.numbers) for each in snapshots] != [(found.id, found.numbers)]:
        raise DamagedCheckpoint("memory", f"{found.id} no longer has completion markers of all ranks")
    return snapshots[0]


def machine_id() -> str:
    """Identify this machine: supervisors on two machines may have folders of the same name."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def _unused_reason(by_rank: Sequence[_Claimed], max_in_flight: int) -> str | None:
    """Return why ranks with a supervisor cannot use its memory; None if they can, or if no rank has one."""
    supervisors = {each.supervisor for each in by_rank}
    if supervisors == {None}:
        return None
    if len(supervisors) > 1:
        return (
            f"snapshots will not survive a crash, because the {len(by_rank)} ranks do not run under one "
            "supervisor; they resume from the store"
        )
    if not all(each.has_all for each in by_rank):
        return (
            "snapshots will not survive a crash, because the supervisor has fewer than "
            f"{len(by_rank) * max_in_flight} free buffers ({max_in_flight} for each of {len(by_rank)} ranks)"
        )
    return None
