"""Two-phase commit of a checkpoint that several ranks write.

Rank 0 begins the checkpoint in the store and sends its folder to the other ranks. Every rank writes its part,
makes it durable and votes. When all ranks have voted to commit, rank 0 writes the manifest. If a rank fails or
dies before that, there is no checkpoint; afterwards the checkpoint is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from holdfast.checkpoint.manifest_copies import write_manifest_copies
from holdfast.distributed.error_transport import describe_error
from holdfast.errors import HoldfastError, IncompleteParts, is_full
from holdfast.format import manifest as fmt
from holdfast.format.shards import RankShard, merge_ranks
from holdfast.protocol.wire import MOST_RANK_SPANS, RankCheckpointTimes
from holdfast.save.draft import Draft, manifest_of
from holdfast.store import CheckpointWriter, Store

STAGES = 3
MakeRoom = Callable[[Exception], bool]
"""Makes room in a full store, given the error; returns whether it did."""


class RankChannel(Protocol):
    """Messages between ranks, for any thread. Any error means that another rank is lost."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def send(self, to: Sequence[int], tag: int, data: bytes) -> None: ...

    def receive(self, sources: Sequence[int], tag: int) -> list[bytes]: ...


class NotPrepared(HoldfastError):
    """A rank has nothing to commit; `torn` when tensors changed while they were copied."""

    def __init__(self, reason: str, *, torn: bool = False) -> None:
        super().__init__(reason)
        self.torn = torn


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
    reason: str | None = None
    torn: bool = False
    again: bool = False
    """It failed, but rank 0 has made room in the store and begins again."""


class _Vote(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's durable part, or the reason why there is none."""

    part: RankShard | None = None
    must_match: dict[str, str] = {}
    """Values that must be equal on all ranks that report the same key."""
    same: list[str] = []
    """Keys of state entries that equal rank 0's, and are not sent."""
    seconds: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Durations of its snapshot, of the stall, and of writing its part."""
    reason: str | None = None
    torn: bool = False
    is_full: bool = False
    """The reason is that the store is full."""


class _Outcome(msgspec.Struct, frozen=True, kw_only=True):
    reason: str | None = None
    torn: bool = False
    again: bool = False
    """As in `_Begin`."""


def commit(
    channel: RankChannel,
    number: int,
    store: Store,
    draft: Draft,
    problem: NotPrepared | None,
    write: Callable[[Draft], Draft],
    on_durable: Callable[[list[RankCheckpointTimes]], None] = lambda _: None,
    make_room: MakeRoom = lambda error: False,
) -> list[fmt.File]:
    """Write this rank's part of a checkpoint and commit it with the other ranks. Returns when it is durable.

    Args:
        number: number of the checkpoint, the same on all ranks.
        problem: why this rank has nothing to write, if so; the checkpoint then fails on all ranks.
        on_durable: called on rank 0 with the durations of the slowest ranks, slowest first.
        make_room: called on rank 0 where the store is full on all ranks that failed; if it returns True, all ranks
            write again.

    Returns:
        All files on rank 0, this rank's files on others.

    Raises:
        NotPrepared: another rank failed or had nothing to write.
        RanksLost: a rank is lost; the checkpoint may or may not be durable.
        Exception: what `write` or the commit raised on this rank.
    """
    if channel.rank == 0:
        lead = _Lead(channel, number, store, draft, write, make_room)
        while (files := lead.run(problem)) is None:
            pass
        on_durable(lead.spans)
        return files
    while (files := _follow(channel, number, draft, problem, write)) is None:
        pass
    return files


def decline(channel: RankChannel, number: int, reason: str) -> None:
    """Fail checkpoint `number` on all ranks, because this rank has no snapshot for it."""
    problem = NotPrepared(reason)
    if channel.rank == 0:
        message = msgspec.msgpack.encode(_Begin(**_reason_fields(problem, "rank 0: ")))
        channel.send(range(1, channel.world_size), _tag(number, 0), message)
        return
    while (begun := _receive_begin(channel, number)).again:
        pass
    if begun.reason is None:
        channel.send([0], _tag(number, 1), msgspec.msgpack.encode(_Vote(**_reason_fields(problem))))
        channel.receive([0], _tag(number, 2))


def commit_alone(store: Store, drafts: Sequence[Draft], write: Callable[[Draft], Draft]) -> list[fmt.File]:
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
        must_match = {draft.rank: draft.must_match for draft in drafts}
        seconds = sum(draft.timings["write_seconds"] for draft in written)
        first = msgspec.structs.replace(written[0], timings=first.timings | {"write_seconds": seconds})
        return _commit_parts(writer, first, must_match, [draft.part for draft in written])
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
        make_room: MakeRoom,
    ) -> None:
        self._channel, self._number, self._store = channel, number, store
        self._draft, self._write, self._make_room = draft, write, make_room
        self._others = range(1, channel.world_size)
        self.spans: list[RankCheckpointTimes] = []
        """Durations of the slowest ranks, once all have voted."""

    def run(self, problem: NotPrepared | None) -> list[fmt.File] | None:
        """Return all files; None when all ranks write again, since there is room now."""
        try:
            if problem is not None:
                raise problem
            draft, digests = self._draft, _digests(self._draft.state)
            writer = self._store.begin(draft.job, draft.id, draft.attempt, _size_bytes(draft))
        except Exception as error:  # the other ranks wait for a message
            self._fail(0, _Begin, error)
            return None
        try:
            files = self._commit(writer, digests)
        except BaseException as error:  # also on Ctrl-C: the other ranks wait for a message
            writer.abort()
            self._fail(2, _Outcome, error)
            return None
        self._send_to_others(2, _Outcome())
        return files

    def _fail(self, stage: int, message: type[_Begin | _Outcome], error: BaseException) -> None:
        """Send the other ranks the reason of a failure, and raise it unless there is room for another try."""
        is_full_store = error.is_full if isinstance(error, _OtherRankFailed) else is_full(error)
        again = isinstance(error, Exception) and is_full_store and self._make_room(error)
        self._send_to_others(stage, message(**_reason_fields(error, "rank 0: "), again=again))
        if not again:
            raise error

    def _commit(self, writer: CheckpointWriter, digests: dict[str, str]) -> list[fmt.File]:
        draft = self._draft
        begun = _begin_message(writer, draft, digests)
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
        must_match = {0: draft.must_match} | {rank: vote.must_match for rank, vote in votes.items()}
        parts = [written.part, *(self._with_shared_state(vote) for vote in votes.values())]
        return _commit_parts(writer, written, must_match, filter(None, parts))

    def _with_shared_state(self, vote: _Vote) -> RankShard | None:
        if vote.part is None:
            return None
        same = {key: self._draft.state[key] for key in vote.same}
        return msgspec.structs.replace(vote.part, state=same | vote.part.state)

    def _send_to_others(self, stage: int, message: _Begin | _Outcome) -> None:
        try:
            self._channel.send(self._others, _tag(self._number, stage), msgspec.msgpack.encode(message))
        except Exception:
            if stage == 0:  # later messages do not change whether the checkpoint is durable
                raise


def _follow(
    channel: RankChannel, number: int, draft: Draft, problem: NotPrepared | None, write: Callable[[Draft], Draft]
) -> list[fmt.File] | None:
    """Return the files of this rank; None when all ranks write again."""
    begun = _receive_begin(channel, number)
    if begun.again:
        return None
    if begun.reason is not None:
        raise NotPrepared(begun.reason, torn=begun.torn)
    error: Exception | None = None
    files: list[fmt.File] = []
    try:
        if problem is not None:
            raise problem
        if begun.id != draft.id:
            raise NotPrepared(f"this rank copied {draft.id}, but rank 0 began {begun.id}")
        written = write(_for_folder(draft, begun))
        same = [key for key, found in _digests(draft.state).items() if found == begun.state.get(key)]
        other = {key: tree for key, tree in draft.state.items() if key not in same}
        part = msgspec.structs.replace(written.part, state=other)
        vote = msgspec.msgpack.encode(
            _Vote(part=part, must_match=draft.must_match, same=same, seconds=_seconds(written))
        )
        files = written.files
    except Exception as raised:  # rank 0 waits for a vote
        error = raised
        vote = msgspec.msgpack.encode(_Vote(**_reason_fields(raised), is_full=is_full(raised)))
    channel.send([0], _tag(number, 1), vote)
    end = msgspec.msgpack.decode(channel.receive([0], _tag(number, 2))[0], type=_Outcome)
    if end.again:
        return None
    if error is not None:
        raise error
    if end.reason is not None:
        raise NotPrepared(end.reason, torn=end.torn)
    return files


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


def _commit_parts(
    writer: CheckpointWriter,
    draft: Draft,
    must_match: Mapping[int, Mapping[str, str]],
    parts: Iterable[RankShard],
) -> list[fmt.File]:
    """Merge and check the parts of all ranks, and commit; return all files."""
    require_agreement(must_match)
    merged = merge_ranks(parts, draft.world_size)
    manifest = manifest_of(draft, merged)
    data = fmt.encode_manifest(manifest)
    write_manifest_copies(writer, manifest, data)
    writer.commit(data, replace=draft.replaces)
    return merged.files


def _begin_message(writer: CheckpointWriter, draft: Draft, state: dict[str, str] | None = None) -> _Begin:
    return _Begin(
        id=draft.id,
        folder=writer.folder,
        attempt=draft.attempt,
        uid=draft.uid,
        state=state or {},
        may_link=draft.may_link,
        compress=draft.compress,
    )


def _for_folder(draft: Draft, begun: _Begin) -> Draft:
    """Return the draft with the folder and attempt of rank 0, which identify markers of the same checkpoint."""
    return msgspec.structs.replace(
        draft,
        folder=begun.folder,
        attempt=begun.attempt,
        uid=begun.uid,
        may_link=begun.may_link and draft.may_link,
        compress=begun.compress,
    )


def _size_bytes(draft: Draft) -> int:
    """Return about how many bytes the rank will write."""
    links = draft.parent is not None and draft.may_link
    return sum(slot.end - slot.start for slot in draft.slots if not (links and slot.name in draft.unchanged))


def _reason_fields(error: BaseException, where: str = "") -> dict[str, Any]:
    """Return the fields of a message about an error, prefixed by `where` unless the error names its rank."""
    where = "" if isinstance(error, (_OtherRankFailed, IncompleteParts)) else where
    return {"reason": where + describe_error(error), "torn": isinstance(error, NotPrepared) and error.torn}


def _digests(state: Mapping[str, Any]) -> dict[str, str]:
    return {key: fmt.digest(msgspec.json.encode(tree)) for key, tree in state.items()}


def _tag(number: int, stage: int) -> int:
    return STAGES * number + stage
