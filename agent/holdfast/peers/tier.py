"""The memory tier of a job on several hosts: a rank's newest snapshots in memory of its host and of another.

A start takes each part from where it is: this rank's own memory, another rank's, the memory of another host. All
ranks resume from one snapshot of which every part was verified, or from the store.
"""

from __future__ import annotations

import contextlib
import platform
import secrets
import socket
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import msgspec

from holdfast.checkpoint import restore
from holdfast.checkpoint.restore import LoadedCheckpoint, Localize, Regions
from holdfast.distributed.ranks import Ranks
from holdfast.errors import DamagedCheckpoint, HoldfastError
from holdfast.format import manifest as fmt
from holdfast.memory_tier.complete_snapshot import CompleteSnapshot
from holdfast.memory_tier.tier import (
    MemoryCheckpoint,
    MemoryTier,
    machine_id,
    open_memory_tier,
    supervisor_folder,
)
from holdfast.peers.connection import TOKEN_BYTES, PeerConnection, ReadBytes, ReadMarker, listen
from holdfast.peers.places import (
    DistributedSnapshot,
    HeldPart,
    PartSource,
    RankPlace,
    complete_snapshots,
    is_one_host,
    replica_targets,
    unusable_reason,
)
from holdfast.peers.replica_sender import NOTICE_CODE, ReplicaSender
from holdfast.peers.replica_server import SLOTS_PER_RANK, ReplicaServer
from holdfast.protocol.ids import parse_checkpoint_id
from holdfast.save.completion_marker import (
    CompletionMarker,
    decode_marker,
    mapped,
    markers_of,
    put_marker,
    read_marker,
    verify,
)
from holdfast.save.draft import Draft
from holdfast.save.host_buffers import Arena, free_slot_pages
from holdfast.save.shared_buffers import SharedBuffer, claim
from holdfast.store import Store
from holdfast.system import io_pool, supervisor_channel, supervisor_files
from holdfast.system.host_memory import fresh_memory
from holdfast.telemetry.reporter import Reporter

MARKERS_AT_ONCE = 8
"""Completion markers of other ranks that are read at the same time."""
KEPT = 1
"""Own snapshots that stay complete while the next one is copied and sent."""


class PeerMemoryTier(MemoryTier):
    """Memory for own snapshots, and for those of ranks on another host. `open_peer_memory_tier` makes it.

    Args:
        places: what each rank has announced, by rank.
        server: holds the snapshots of other hosts.
        sender: sends those of this rank.
    """

    sender: ReplicaSender

    def __init__(
        self,
        job: str,
        uid: str,
        ranks: Ranks,
        reporter: Reporter,
        *,
        folder: Path,
        slots: Sequence[SharedBuffer],
        places: Sequence[RankPlace],
        server: ReplicaServer,
        sender: ReplicaSender,
    ) -> None:
        super().__init__(job, uid, ranks, reporter, folder=folder, slots=slots)
        self._supervisor, self._places, self._server, self.sender = folder, places, server, sender
        self._snapshots = complete_snapshots(places)
        self._hosts_read: set[str] = set()
        """Other hosts that parts of the loaded snapshot came from."""

    @property
    def is_sending(self) -> bool:
        return self.sender.is_sending

    @property
    def is_receiving(self) -> bool:
        return self._server.is_receiving

    @property
    def may_hold_snapshots(self) -> bool:
        return bool(self._snapshots)

    def candidates(self, store: Store, durable: Sequence[tuple[str, bool]]) -> list[MemoryCheckpoint]:
        is_usable = self._usable(store, durable, {uid for place in self._places for uid in place.published_uids})
        return [
            MemoryCheckpoint(id=each.id, numbers=[], folder=each.folder)
            for each in self._snapshots
            if is_usable(each.uid, each.position)
        ]

    def load(
        self, found: MemoryCheckpoint, regions: Regions | None, localize: Localize = lambda manifest: manifest
    ) -> LoadedCheckpoint:
        """Verify and load what this rank needs, of a snapshot of any number of ranks."""
        snapshot = next(each for each in self._snapshots if (each.id, each.folder) == (found.id, found.folder))
        self._hosts_read = set()
        rank = self._ranks.rank
        own = self._own_part(snapshot) if len(snapshot.sources) == self._ranks.world_size else None
        markers = self._markers(snapshot, own)
        complete = CompleteSnapshot(markers)
        part_of = {marker.draft.files[0].name: marker for marker in markers}

        def payload(file: fmt.File, names: Collection[str]) -> memoryview:
            marker = part_of[file.name]
            if marker is own:
                return self._arena(complete).bytes(marker.draft.size_bytes)
            return self._payload(snapshot, marker, names)

        loaded = restore.load_from_memory(localize(complete.manifest()), payload, rank=rank, regions=regions)
        self._loaded = complete
        return loaded

    def survivor(self) -> tuple[Arena, Draft]:
        if self._loaded is not None and len(self._loaded.markers) != self._ranks.world_size:
            raise HoldfastError(f"it is of {len(self._loaded.markers)} ranks; the next checkpoint has all of it")
        return super().survivor()

    def report_start(self, committed: Sequence[str]) -> None:
        super().report_start(committed)
        if self._loaded is None:
            return
        used = [set(filter(None, each.decode().split("\n"))) for each in self._ranks.gather(self._described())]
        if self._ranks.leads and (ranks := [str(rank) for rank, sources in enumerate(used) if sources]):
            hosts = ", ".join(sorted(set().union(*used)))
            self._reporter.notice(
                "info",
                NOTICE_CODE,
                f"read parts of the snapshot from the memory of {hosts} on ranks {', '.join(ranks)}",
            )

    @property
    def _is_first_on_host(self) -> bool:
        rank = self._ranks.rank
        return all(place.machine != self._places[rank].machine for place in self._places[:rank])

    def close(self, head: str | None) -> None:
        self._disconnect()
        saved = parse_checkpoint_id(head)[0] if head is not None else 0
        for slot in self._server.slots:
            marker = read_marker(slot)
            if marker is None or marker.draft.iteration <= saved:
                with contextlib.suppress(OSError):
                    slot.remove_marker()
                    free_slot_pages(slot)
            slot.release()
        super().close(head)

    def release(self) -> None:
        self._disconnect()
        for slot in self._server.slots:
            slot.release()
        super().release()

    # Reading a snapshot, each part from one of its sources

    def _own_part(self, snapshot: DistributedSnapshot) -> CompletionMarker:
        """Verify this rank's part in its own memory, or copy it there."""
        for source in self._sources(snapshot, self._ranks.rank):
            with self._trying(snapshot, self._ranks.rank, source):
                content, marker = self._read_marker(snapshot, source)
                size_bytes = marker.draft.size_bytes
                arena = next((each for each in self.arenas if self._is_in(each, source)), None)
                if arena is not None:
                    arena.adopt(size_bytes)
                    verify(marker, arena.bytes(size_bytes))
                    return CompletionMarker(marker.draft, source.number)
                arena = self.arenas[-1]
                arena.remove_marker()
                arena.reserve(size_bytes)
                if arena.slot is None:
                    raise MemoryError("the supervisor has too little memory for it")
                self._read(source, [(0, size_bytes)], arena.bytes(size_bytes))
                verify(marker, arena.bytes(size_bytes))
                put_marker(arena.slot.marker, content)
                self._used(source)
                return CompletionMarker(marker.draft, arena.slot.number)
        raise self._nowhere(snapshot, self._ranks.rank)

    def _markers(
        self, snapshot: DistributedSnapshot, own: CompletionMarker | None
    ) -> tuple[CompletionMarker, ...]:
        """Read the completion markers of all parts, several at a time, since most come from other hosts."""
        ranks = range(len(snapshot.sources))
        found = {} if own is None else {own.draft.rank: own}

        def read(rank: int) -> None:
            found[rank] = self._marker(snapshot, rank)

        io_pool.share_out(read, [rank for rank in ranks if rank not in found], MARKERS_AT_ONCE)
        return tuple(found[rank] for rank in ranks)

    def _marker(self, snapshot: DistributedSnapshot, rank: int) -> CompletionMarker:
        """Read the completion marker of another rank's part."""
        for source in self._sources(snapshot, rank):
            with self._trying(snapshot, rank, source):
                return self._read_marker(snapshot, source)[1]
        raise self._nowhere(snapshot, rank)

    def _payload(
        self, snapshot: DistributedSnapshot, marker: CompletionMarker, names: Collection[str]
    ) -> memoryview:
        """Read and verify tensors of another rank's part, at their places in a view of all of it."""
        draft = marker.draft
        ranges = [(slot.start, slot.end) for slot in draft.slots if slot.name in names]
        for source in self._sources(snapshot, draft.rank):
            with self._trying(snapshot, draft.rank, source):
                memory = memoryview(fresh_memory(draft.size_bytes))[: draft.size_bytes]
                self._read(source, ranges, memory)
                verify(marker, memory, only=names)
                self._used(source)
                return memory
        raise self._nowhere(snapshot, draft.rank)

    def _read_marker(self, snapshot: DistributedSnapshot, source: PartSource) -> tuple[bytes, CompletionMarker]:
        if self._is_here(source):
            content = SharedBuffer(self._supervisor, source.number).marker.read_bytes()
        else:
            with contextlib.closing(self._connect(source)) as connection:
                connection.send(ReadMarker(number=source.number))
                content = connection.receive_reply().data
        marker = decode_marker(content, source.number)
        if fmt.digest(content) != source.digest or marker is None or marker.draft.id != snapshot.id:
            raise DamagedCheckpoint("its completion marker", "is not the one that was announced")
        return content, marker

    def _read(self, source: PartSource, ranges: list[tuple[int, int]], target: memoryview) -> None:
        """Read ranges of a part to their places in `target`."""
        if self._is_here(source):
            with mapped(SharedBuffer(self._supervisor, source.number), len(target)) as memory:
                for start, end in ranges:
                    target[start:end] = memory[start:end]
            return
        with contextlib.closing(self._connect(source)) as connection:
            connection.send(ReadBytes(number=source.number, ranges=ranges))
            connection.receive_reply()
            for start, end in ranges:
                connection.receive_into(target[start:end])

    def _connect(self, source: PartSource) -> PeerConnection:
        place = self._places[source.place]
        return PeerConnection.open(place.address, place.port, place.token)

    @contextlib.contextmanager
    def _trying(self, snapshot: DistributedSnapshot, rank: int, source: PartSource) -> Iterator[None]:
        """Report what is wrong with one copy of a part, and go on to the next one."""
        try:
            yield
        except (HoldfastError, OSError, MemoryError) as error:
            iteration, host = snapshot.position[1], self._places[source.place].host
            self._reporter.notice(
                "warning", NOTICE_CODE,
                f"rank {rank}'s part of the snapshot of iteration {iteration:,} in the memory of {host} is not "
                f"used: {error}",
            )  # fmt: skip

    def _nowhere(self, snapshot: DistributedSnapshot, rank: int) -> DamagedCheckpoint:
        hosts = ", ".join(self._places[source.place].host for source in snapshot.sources[rank])
        return DamagedCheckpoint("memory", f"no sound copy of rank {rank}'s part is left in the memory of {hosts}")

    def _sources(self, snapshot: DistributedSnapshot, rank: int) -> list[PartSource]:
        """Return the copies of a part: first in this rank's own memory, then on this host, then on others."""

        def distance(source: PartSource) -> int:
            if not self._is_here(source):
                return 2
            return 0 if any(self._is_in(arena, source) for arena in self.arenas) else 1

        return sorted(snapshot.sources[rank], key=distance)

    def _is_here(self, source: PartSource) -> bool:
        return self._places[source.place].machine == self._places[self._ranks.rank].machine

    def _is_in(self, arena: Arena, source: PartSource) -> bool:
        return self._is_here(source) and arena.slot is not None and arena.slot.number == source.number

    def _used(self, source: PartSource) -> None:
        if not self._is_here(source):
            self._hosts_read.add(self._places[source.place].host)

    def _described(self) -> bytes:
        return "\n".join(sorted(self._hosts_read)).encode()

    def _disconnect(self) -> None:
        self.sender.close()
        self._server.close()


def open_peer_memory_tier(job: str, uid: str, max_in_flight: int, ranks: Ranks, reporter: Reporter) -> MemoryTier:
    """Claim slots for this rank and for those that send to it, once all have announced what their hosts hold.

    Collective over all ranks. On one host it is the ordinary memory tier.
    """
    if ranks.world_size == 1:
        note = "peers=1 has no effect: the job has one rank"
        return open_memory_tier(job, uid, max_in_flight, ranks, reporter, note)
    folder, needed = supervisor_folder(), max_in_flight + KEPT
    claimed: list[SharedBuffer] = []
    if folder is not None:
        own = [each.number for each in markers_of(folder, job) if each.draft.rank == ranks.rank]
        claimed = claim(folder, own, needed)
    token, (listening, problem) = secrets.token_bytes(TOKEN_BYTES), _listen()
    if folder is None:
        problem = "no supervisor holds memory there: start each host with `holdfast run`"
    elif len(claimed) < needed:
        problem = f"its supervisor has fewer than {needed} free buffers for it"
    place = _place(job, uid, folder, listening, token, problem)
    gathered = ranks.gather(msgspec.msgpack.encode(place))
    places = [msgspec.msgpack.decode(each, type=RankPlace) for each in gathered]
    reason = unusable_reason(places)
    if is_one_host(places) or reason is not None or folder is None or listening is None:
        for slot in claimed:
            slot.release()
        if listening is not None:
            listening.close()
        if is_one_host(places):
            note = "peers=1 has no effect: all ranks run on one host"
            return open_memory_tier(job, uid, max_in_flight, ranks, reporter, note)
        return MemoryTier(job, uid, ranks, reporter, private=max_in_flight, unused_reason=reason)
    supervisor_channel.publish_uid(places[0].uid)  # also where rank 0 runs elsewhere: it may come here
    targets = replica_targets(places)
    target = targets[ranks.rank]
    server = ReplicaServer(folder, job, listening, token, _claim_for_replicas(folder, job, ranks.rank, targets))
    server.start()
    return PeerMemoryTier(
        job, uid, ranks, reporter, folder=folder, places=places, server=server,
        slots=claimed[::-1],  # snapshots use them in turn: the newest one that is complete is overwritten last
        sender=ReplicaSender(places[target], target, reporter),
    )  # fmt: skip


def _place(
    job: str, uid: str, folder: Path | None, listening: socket.socket | None, token: bytes, problem: str | None
) -> RankPlace:
    """Return what this rank announces about its host."""
    address, port = listening.getsockname()[:2] if listening is not None else ("", 0)
    return RankPlace(
        machine=machine_id(), host=platform.node(), supervisor=str(folder) if folder is not None else None,
        address=address, port=port, token=token, uid=uid,
        published_uids=sorted(supervisor_files.published_uids(folder)) if folder is not None else [],
        parts=list(_held_parts(folder, job)) if folder is not None else [], unusable=problem,
    )  # fmt: skip


def _claim_for_replicas(
    folder: Path, job: str, rank: int, targets: Sequence[int]
) -> dict[int, list[SharedBuffer]]:
    """Claim slots for the replicas of each rank that sends its snapshots to this one."""
    markers, slots = markers_of(folder, job), {}
    for sender, target in enumerate(targets):
        if target == rank:
            held = [marker.number for marker in markers if marker.draft.rank == sender]
            slots[sender] = claim(folder, held, SLOTS_PER_RANK)
    return slots


def _listen() -> tuple[socket.socket | None, str | None]:
    """Listen for other ranks; return why that is not possible, if so."""
    try:
        return listen(), None
    except OSError as error:
        return (
            None,
            f"it cannot listen for the other hosts ({error}): set GLOO_SOCKET_IFNAME to their network interface",
        )


def _held_parts(folder: Path, job: str) -> Iterator[HeldPart]:
    """Yield the parts of snapshots of several ranks that the slots of a supervisor hold."""
    for marker in markers_of(folder, job):
        draft = marker.draft
        if draft.folder is None:
            continue
        with contextlib.suppress(OSError):
            content = SharedBuffer(folder, marker.number).marker.read_bytes()
            yield HeldPart(
                number=marker.number, digest=fmt.digest(content), id=draft.id, uid=draft.uid, folder=draft.folder,
                rank=draft.rank, world_size=draft.world_size,
            )  # fmt: skip
