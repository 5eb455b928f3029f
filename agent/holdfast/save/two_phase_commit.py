"""Two-phase commit of a checkpoint that several ranks write.

Rank 0 begins the checkpoint in the store and sends its folder to the other ranks. Every rank writes its part,
makes it durable and votes. When all ranks have voted to commit, rank 0 writes the manifest. If a rank fails or
dies before that, there is no checkpoint; afterwards the checkpoint is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from holdfast.checkpoint import stored_manifest
from holdfast.checkpoint.stored_manifest import has_copies
from holdfast.distributed.error_transport import describe_error
from holdfast.errors import IncompleteParts, is_full
from holdfast.format import manifest as fmt
from holdfast.format.manifest_files import ManifestFile, RankEntry
from holdfast.format.shards import RankStructure, require_own_files
from holdfast.protocol.wire import MOST_RANK_SPANS, RankCheckpointTimes
from holdfast.save.draft import Draft, state_digests
from holdfast.save.run import NotPrepared
from holdfast.save.structures import (
    CompleteStructure,
    KnownStructures,
    digest_of,
    rank_structure,
    store_structure,
)
from holdfast.store import CheckpointWriter, Store

STAGES = 3


class RankChannel(Protocol):
    """Messages between ranks, for any thread. Any error means that another rank is lost."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def send(self, to: Sequence[int], tag: int, data: bytes) -> None: ...

    def receive(self, sources: Sequence[int], tag: int) -> list[bytes]: ...


class _OtherRankFailed(NotPrepared):
    """Another rank, named in the message, failed; with `is_full`, all that failed found the store full."""

    def __init__(self, message: str, *, torn: bool, is_full: bool) -> None:
        super().__init__(message, torn=torn)
        self.is_full = is_full


class _Begin(msgspec.Struct, frozen=True, kw_only=True):
    """Rank 0 began the checkpoint, or the reason why it did not."""

    id: str = ""
    """Checkpoint id; each rank checks that its own part has the same."""
    folder: str = ""
    attempt: int = 0
    uid: str = ""
    """The attempt's identifier in the store."""
    state: dict[str, str] = {}
    """Digests of rank 0's state by entry: other ranks send only entries that differ."""
    may_link: bool = True
    """Whether files of earlier checkpoints may be linked."""
    compress: bool = False
    """Whether files are encoded."""
    structure: str = ""
    """The structure that rank 0 knows: other ranks send their part of another one."""
    reason: str | None = None
    torn: bool = False
    again: bool = False
    """It failed, but rank 0 has made room in the store and begins again."""


class _Vote(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's durable part, or the reason why there is none."""

    index: RankEntry | None = None
    structure: str = ""
    """Digest of the rank's part of the structure."""
    part: RankStructure | None = None
    """The part, unless it is that of the structure which rank 0 named."""
    must_match: dict[str, str] = {}
    """Values that must be equal on all ranks that report the same key."""
    seconds: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Durations of its snapshot, of the stall, and of writing its part."""
    reason: str | None = None
    torn: bool = False
    is_full: bool = False
    """The reason is that the store is full."""


class _Outcome(msgspec.Struct, frozen=True, kw_only=True):
    structure: str = ""
    """The structure of the checkpoint, which rank 0 now knows."""
    reason: str | None = None
    torn: bool = False
    again: bool = False
    """As in `_Begin`."""


class RankCommit:
    """Commits the checkpoints of this rank together with the other ranks. For any thread.

    Args:
        make_room: called on rank 0 where the store is full on all ranks that failed; if it returns True, all ranks
            write again.
        known: structures of earlier checkpoints, which need not be sent again.
    """

    def __init__(
        self,
        channel: RankChannel,
        store: Store,
        make_room: Callable[[Exception], bool] = lambda error: False,
        known: KnownStructures | None = None,
    ) -> None:
        self._channel, self._store, self._make_room = channel, store, make_room
        self._known = known or KnownStructures()

    def commit(
        self,
        number: int,
        draft: Draft,
        problem: NotPrepared | None,
        write: Callable[[Draft], Draft],
        on_durable: Callable[[list[RankCheckpointTimes]], None] = lambda _: None,
    ) -> Sequence[fmt.File | fmt.FileSummary]:
        """Write this rank's part of a checkpoint and commit it with the other ranks. Returns when it is durable.

        Args:
            number: number of the checkpoint, the same on all ranks.
            problem: why this rank has nothing to write, if so; the checkpoint then fails on all ranks.
            on_durable: called on rank 0 with the durations of the slowest ranks, slowest first.

        Returns:
            All files on rank 0, this rank's files on others.

        Raises:
            NotPrepared: another rank failed or had nothing to write.
            RanksLost: a rank is lost; the checkpoint may or may not be durable.
            Exception: what `write` or the commit raised on this rank.
        """
        channel, known = self._channel, self._known
        if channel.rank == 0:
            lead = _Lead(channel, number, self._store, draft, write, self._make_room, known)
            while (files := lead.run(problem)) is None:
                pass
            on_durable(lead.spans)
            return files
        while (files := _follow(channel, number, draft, problem, write, known)) is None:
            pass
        return files

    def decline(self, number: int, reason: str) -> None:
        """Fail checkpoint `number` on all ranks, because this rank has no snapshot for it."""
        channel, problem = self._channel, NotPrepared(reason)
        if channel.rank == 0:
            message = msgspec.msgpack.encode(_Begin(**_reason_fields(problem, "rank 0: ")))
            channel.send(range(1, channel.world_size), _tag(number, 0), message)
            return
        while (begun := _receive_begin(channel, number)).again:
            pass
        if begun.reason is None:
            channel.send([0], _tag(number, 1), msgspec.msgpack.encode(_Vote(**_reason_fields(problem))))
            channel.receive([0], _tag(number, 2))


def commit_alone(
    store: Store, drafts: Sequence[Draft], write: Callable[[Draft], Draft]
) -> Sequence[fmt.File | fmt.FileSummary]:
    """Write and commit the parts of all ranks, by rank, after the ranks have ended; return their files.

    Raises:
        NotPrepared, IncompleteParts: the parts do not belong to one checkpoint.
        Exception: what `write` or the commit raised; the partial checkpoint is removed.
    """
    first = drafts[0]
    writer = store.begin(first.job, first.id, first.attempt, _size_bytes(first))
    try:
        begun = _begin_message(writer, first)
        written = [write(_for_folder(draft, begun)) for draft in drafts]
        seconds = sum(draft.timings["write_seconds"] for draft in written)
        first = msgspec.structs.replace(written[0], timings=first.timings | {"write_seconds": seconds})
        votes = [_vote(draft) for draft in written]
        return _commit_votes(writer, store, first, votes, begun, KnownStructures())[0].files
    except BaseException:  # also on Ctrl-C: remove the partial checkpoint
        writer.abort()
        raise


class _Lead:
    def __init__(
        self,
        channel: RankChannel,
        number: int,
        store: Store,
        draft: Draft,
        write: Callable[[Draft], Draft],
        make_room: Callable[[Exception], bool],
        known: KnownStructures,
    ) -> None:
        self._known = known
        self._channel, self._number, self._store = channel, number, store
        self._draft, self._write, self._make_room = draft, write, make_room
        self._others = range(1, channel.world_size)
        self.spans: list[RankCheckpointTimes] = []
        """Durations of the slowest ranks, once all have voted."""

    def run(self, problem: NotPrepared | None) -> Sequence[fmt.File | fmt.FileSummary] | None:
        """Return all files; None when all ranks write again, since there is room now."""
        try:
            if problem is not None:
                raise problem
            draft = self._draft
            writer = self._store.begin(draft.job, draft.id, draft.attempt, _size_bytes(draft))
        except Exception as error:  # the other ranks wait for a message
            self._fail(0, _Begin, error)
            return None
        try:
            manifest, structure = self._commit(writer)
        except BaseException as error:  # also on Ctrl-C: the other ranks wait for a message
            writer.abort()
            self._fail(2, _Outcome, error)
            return None
        self._known.remember(structure, draft.id)
        self._send_to_others(2, _Outcome(structure=structure.key))
        return manifest.files

    def _fail(self, stage: int, message: type[_Begin | _Outcome], error: BaseException) -> None:
        """Send the other ranks the reason of a failure, and raise it unless there is room for another try."""
        is_full_store = error.is_full if isinstance(error, _OtherRankFailed) else is_full(error)
        again = isinstance(error, Exception) and is_full_store and self._make_room(error)
        self._send_to_others(stage, message(**_reason_fields(error, "rank 0: "), again=again))
        if not again:
            raise error

    def _commit(self, writer: CheckpointWriter) -> tuple[ManifestFile, CompleteStructure]:
        draft = self._draft
        begun = _begin_message(writer, draft, self._known.newest)
        self._send_to_others(0, begun)
        written, error = None, None
        try:
            written = self._write(_for_folder(draft, begun))
        except Exception as raised:  # wait for the other ranks' writes before the folder is removed
            error = raised
        received = self._channel.receive(self._others, _tag(self._number, 1))
        decoded = (msgspec.msgpack.decode(data, type=_Vote) for data in received)
        votes = dict(zip(self._others, decoded, strict=True))
        failed = {rank: vote for rank, vote in votes.items() if vote.reason is not None}
        are_full = all(vote.is_full for vote in failed.values())
        if error is not None and (are_full or not is_full(error)):
            raise error
        for rank, vote in failed.items():
            if are_full or not vote.is_full:  # rather the reason that room does not remove
                raise _OtherRankFailed(f"rank {rank}: {vote.reason}", torn=vote.torn, is_full=are_full)
        assert written is not None
        seconds = {0: _seconds(written)} | {rank: vote.seconds for rank, vote in votes.items()}
        self.spans = _slowest(seconds)
        ordered = [_vote(written), *votes.values()]
        return _commit_votes(writer, self._store, written, ordered, begun, self._known)

    def _send_to_others(self, stage: int, message: _Begin | _Outcome) -> None:
        try:
            self._channel.send(self._others, _tag(self._number, stage), msgspec.msgpack.encode(message))
        except Exception:
            if stage == 0:  # later messages do not change whether the checkpoint is durable
                raise


def _follow(
    channel: RankChannel,
    number: int,
    draft: Draft,
    problem: NotPrepared | None,
    write: Callable[[Draft], Draft],
    known: KnownStructures,
) -> Sequence[fmt.File | fmt.FileSummary] | None:
    """Return the files of this rank; None when all ranks write again."""
    begun = _receive_begin(channel, number)
    if begun.again:
        return None
    if begun.reason is not None:
        raise NotPrepared(begun.reason, torn=begun.torn)
    error: Exception | None = None
    try:
        if problem is not None:
            raise problem
        if begun.id != draft.id:
            raise NotPrepared(f"this rank copied {draft.id}, but rank 0 began {begun.id}")
        vote = _vote(write(_for_folder(draft, begun)))
        if known.has_own(begun.structure, vote.structure):
            vote = msgspec.structs.replace(vote, part=None)
    except Exception as raised:  # rank 0 waits for a vote
        error = raised
        vote = _Vote(**_reason_fields(raised), is_full=is_full(raised))
    channel.send([0], _tag(number, 1), msgspec.msgpack.encode(vote))
    end = msgspec.msgpack.decode(channel.receive([0], _tag(number, 2))[0], type=_Outcome)
    if end.again:
        return None
    if error is not None:
        raise error
    if end.reason is not None:
        raise NotPrepared(end.reason, torn=end.torn)
    known.remember_own(end.structure, vote.structure)
    assert vote.index is not None
    return vote.index.files


def _vote(written: Draft) -> _Vote:
    part = rank_structure(written)
    return _Vote(
        index=written.index,
        structure=digest_of(part),
        part=part,
        must_match=written.must_match,
        seconds=_seconds(written),
    )


def _seconds(written: Draft) -> tuple[float, float, float]:
    timings = written.timings
    return timings.get("snapshot_seconds", 0.0), timings.get("stall_seconds", 0.0), timings["write_seconds"]


def _slowest(seconds: Mapping[int, tuple[float, float, float]]) -> list[RankCheckpointTimes]:
    spans = [
        RankCheckpointTimes(rank=rank, snapshot_seconds=copied, stall_seconds=stalled, persist_seconds=wrote)
        for rank, (copied, stalled, wrote) in seconds.items()
    ]
    return sorted(spans, key=lambda each: -each.snapshot_seconds - each.persist_seconds)[:MOST_RANK_SPANS]


def _receive_begin(channel: RankChannel, number: int) -> _Begin:
    return msgspec.msgpack.decode(channel.receive([0], _tag(number, 0))[0], type=_Begin)


def require_agreement(by_rank: Mapping[int, Mapping[str, str]]) -> None:
    """Raise NotPrepared when two ranks have different `must_match` values: their parts are of different states."""
    first: dict[str, tuple[int, str]] = {}
    for rank, known in by_rank.items():
        for key, value in sorted(known.items()):  # "data" first: if it differs, the rest does too
            other, expected = first.setdefault(key, (rank, value))
            if value == expected:
                continue
            if key == "data":
                raise NotPrepared(
                    f"rank {rank} is at {value}, rank {other} at {expected}: every rank must call session.step() "
                    "after the same batches"
                )
            raise NotPrepared(
                f"ranks {other} and {rank} have different values for replicated state, such as parameters under "
                "DistributedDataParallel: check that every update reduces gradients over all ranks, and that no "
                "other tensor has the same name"
            )


def _commit_votes(
    writer: CheckpointWriter,
    store: Store,
    draft: Draft,
    votes: Sequence[_Vote],
    begun: _Begin,
    known: KnownStructures,
) -> tuple[ManifestFile, CompleteStructure]:
    """Check the parts of all ranks, by rank, and commit."""
    require_agreement({rank: vote.must_match for rank, vote in enumerate(votes)})
    structure = known.merge(begun.structure, [(vote.structure, vote.part) for vote in votes])
    indexes = [vote.index for vote in votes if vote.index is not None]
    require_own_files([[file.name for file in index.files] for index in indexes], draft.world_size)
    manifest = ManifestFile(**fmt.description_of(draft), structure=structure.stored, ranks=indexes)
    source = known.checkpoint_with(structure) if draft.may_link else None
    store_structure(writer, store, draft.job, structure, source, copied=has_copies(manifest.files))
    stored_manifest.commit(writer, manifest, replace=draft.replaces)
    return manifest, structure


def _begin_message(writer: CheckpointWriter, draft: Draft, structure: str = "") -> _Begin:
    return _Begin(
        id=draft.id,
        folder=writer.folder,
        attempt=draft.attempt,
        uid=draft.uid,
        state=state_digests(draft.state),
        structure=structure,
        may_link=draft.may_link,
        compress=draft.compress,
    )


def _for_folder(draft: Draft, begun: _Begin) -> Draft:
    """Return the draft with the folder and attempt of rank 0, which identify markers of the same checkpoint."""
    return msgspec.structs.replace(
        draft,
        folder=begun.folder,
        first_state=begun.state if draft.rank else {},
        attempt=begun.attempt,
        uid=begun.uid,
        may_link=begun.may_link and draft.may_link,
        compress=begun.compress,
    )


def _size_bytes(draft: Draft) -> int:
    """Return about how many bytes the rank will write."""
    links = draft.parent is not None and draft.may_link
    written = (slot for slot in draft.slots if not (links and slot.name in draft.unchanged))
    return sum(slot.end - slot.start for slot in written) + draft.image_bytes


def _reason_fields(error: BaseException, where: str = "") -> dict[str, Any]:
    """Return the fields of a message about an error, prefixed by `where` unless the error names its rank."""
    where = "" if isinstance(error, (_OtherRankFailed, IncompleteParts)) else where
    return {"reason": where + describe_error(error), "torn": isinstance(error, NotPrepared) and error.torn}


def _tag(number: int, stage: int) -> int:
    return STAGES * number + stage
