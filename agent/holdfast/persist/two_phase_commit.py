"""Two-phase commit of what several ranks write: prepared by all, with digests; then the manifest; then it exists.

Rank 0 begins a checkpoint in the store and tells where. Every rank writes its part there, makes it durable and
says so. Only when all have, rank 0 writes the manifest. A rank that dies or fails before that leaves no
checkpoint; one that dies after that leaves a whole one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from holdfast.distributed.error_transport import describe_error
from holdfast.errors import HoldfastError, IncompleteParts
from holdfast.format import manifest as fmt
from holdfast.format.shards import RankShard, merge_ranks
from holdfast.persist.task import Task, Written
from holdfast.persist.writer import manifest_of
from holdfast.protocol.messages import MOST_RANKS_TOLD, RankSpan
from holdfast.store import CheckpointWriter, Store

STAGES = 3


class RankChannel(Protocol):
    """Messages between ranks, from any thread. Whatever it raises means that another rank is gone."""

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
    """On another rank, which its text names."""


class _Begun(msgspec.Struct, frozen=True, kw_only=True):
    """Rank 0 has begun, or says why not."""

    id: str = ""
    """The checkpoint: that every rank has a part of this one ready is certain, and looked at again."""
    place: str = ""
    attempt: int = 0
    uid: str = ""
    """Of the attempt, as the store knows it."""
    state: dict[str, str] = {}
    """Digests of rank 0's state, entry by entry: others tell what is otherwise with them."""
    reason: str | None = None
    torn: bool = False


class _Vote(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's part is durable, or why there is none."""

    part: RankShard | None = None
    alike: dict[str, str] = {}
    """What ranks that know it must say the same of."""
    same: list[str] = []
    """Entries of the state that are as on rank 0, and not sent."""
    seconds: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Of its snapshot, of training's wait for that, and of writing its part."""
    reason: str | None = None
    torn: bool = False


class _End(msgspec.Struct, frozen=True, kw_only=True):
    reason: str | None = None
    torn: bool = False


def commit(
    channel: RankChannel,
    number: int,
    store: Store,
    task: Task,
    problem: NotPrepared | None,
    write: Callable[[Task], Written],
    on_durable: Callable[[list[RankSpan]], None] = lambda _: None,
) -> int:
    """Take part in making a checkpoint durable; all ranks do, under the same number. Returns when it is.

    `write` writes this rank's part; `problem` says why there is nothing to write. Rank 0 calls `on_durable` with
    the durations of each rank, the slowest first, once the checkpoint is durable.

    Returns:
        The bytes of all files; on other ranks than 0, of this one's.

    Raises:
        NotPrepared: another rank had nothing to write, or could not.
        Exception: what this rank's writing raised, or its commit.
        RanksLost: a rank is gone; nobody knows what became of the checkpoint.
    """
    if channel.rank == 0:
        lead = _Lead(channel, number, store, task, write)
        size_bytes = lead.run(problem)
        on_durable(lead.spans)
        return size_bytes
    return _follow(channel, number, task, problem, write)


def decline(channel: RankChannel, number: int, reason: str) -> None:
    """Take part without a snapshot: the checkpoint fails everywhere."""
    problem = NotPrepared(reason)
    if channel.rank == 0:
        message = msgspec.msgpack.encode(_Begun(**_reason_fields(problem, "rank 0: ")))
        channel.send(range(1, channel.world_size), _tag(number, 0), message)
        return
    begun = _begun(channel, number)
    if begun.reason is None:
        channel.send([0], _tag(number, 1), msgspec.msgpack.encode(_Vote(**_reason_fields(problem))))
        channel.receive([0], _tag(number, 2))


def commit_alone(store: Store, tasks: Sequence[Task], write: Callable[[Task], Written]) -> int:
    """Make a checkpoint of all ranks durable where none of them is left: `tasks` are theirs, by rank.

    Returns:
        The bytes of all files.

    Raises:
        NotPrepared, IncompleteParts: their parts do not belong to one checkpoint.
        Exception: what `write` raised, or the commit. Nothing of the checkpoint is left then.
    """
    first = tasks[0]
    writer = store.begin(first.origin.job, first.id, first.origin.attempt, _size_bytes(first))
    try:
        begun = _begun_in(writer, first)
        written = [write(_placed(task, begun)) for task in tasks]
        alike = {task.origin.rank: task.alike for task in tasks}
        parts = [each.part for each in written if each.part is not None]
        return _conclude(writer, first, alike, parts, sum(each.write_seconds for each in written))
    except BaseException:  # whatever it was, half a checkpoint must not stay; it is raised again
        writer.abort()
        raise


class _Lead:
    def __init__(
        self, channel: RankChannel, number: int, store: Store, task: Task, write: Callable[[Task], Written]
    ) -> None:
        self._channel, self._number, self._store = channel, number, store
        self._task, self._write = task, write
        self._others = range(1, channel.world_size)
        self.spans: list[RankSpan] = []
        """What the slowest ranks took, once all have voted."""

    def run(self, problem: NotPrepared | None) -> int:
        try:
            if problem is not None:
                raise problem
            origin, digests = self._task.origin, _digests(self._task.state)
            writer = self._store.begin(origin.job, self._task.id, origin.attempt, _size_bytes(self._task))
        except Exception as error:  # the others wait for a word
            self._send_to_others(0, _Begun(**_reason_fields(error, "rank 0: ")))
            raise
        try:
            size_bytes = self._commit(writer, digests)
        except BaseException as error:  # whatever ends it here, the others wait for a word
            writer.abort()
            self._send_to_others(2, _End(**_reason_fields(error, "rank 0: ")))
            raise
        self._send_to_others(2, _End())
        return size_bytes

    def _commit(self, writer: CheckpointWriter, digests: dict[str, str]) -> int:
        task = self._task
        begun = _begun_in(writer, task, digests)
        self._send_to_others(0, begun)
        written, error = None, None
        try:
            written = self._write(_placed(task, begun))
        except Exception as raised:  # those of the others are waited for: nobody may be writing when it is removed
            error = raised
        heard = self._channel.receive(self._others, _tag(self._number, 1))
        votes = dict(zip(self._others, (msgspec.msgpack.decode(data, type=_Vote) for data in heard), strict=True))
        if error is not None:
            raise error
        for rank, vote in votes.items():
            if vote.reason is not None:
                raise _OtherRankFailed(f"rank {rank}: {vote.reason}", torn=vote.torn)
        assert written is not None
        seconds = {0: _seconds(task, written)} | {rank: vote.seconds for rank, vote in votes.items()}
        self.spans = _slowest(seconds)
        alike = {0: task.alike} | {rank: vote.alike for rank, vote in votes.items()}
        parts = [written.part, *(self._completed(vote) for vote in votes.values())]
        return _conclude(writer, task, alike, filter(None, parts), written.write_seconds)

    def _completed(self, vote: _Vote) -> RankShard | None:
        if vote.part is None:
            return None
        same = {key: self._task.state[key] for key in vote.same}
        return msgspec.structs.replace(vote.part, state=same | vote.part.state)

    def _send_to_others(self, stage: int, message: _Begun | _End) -> None:
        try:
            self._channel.send(self._others, _tag(self._number, stage), msgspec.msgpack.encode(message))
        except Exception:
            if stage == 0:  # later the checkpoint is durable or not, whether or not the others hear of it
                raise


def _follow(
    channel: RankChannel, number: int, task: Task, problem: NotPrepared | None, write: Callable[[Task], Written]
) -> int:
    begun = _begun(channel, number)
    if begun.reason is not None:
        raise NotPrepared(begun.reason, torn=begun.torn)
    error: Exception | None = None
    size_bytes = 0
    try:
        if problem is not None:
            raise problem
        if begun.id != task.id:
            raise NotPrepared(f"it has {task.id} ready, and rank 0 began {begun.id}")
        written = write(_placed(task, begun))
        assert written.part is not None
        same = [key for key, found in _digests(task.state).items() if found == begun.state.get(key)]
        other = {key: tree for key, tree in task.state.items() if key not in same}
        part = msgspec.structs.replace(written.part, state=other)
        vote = msgspec.msgpack.encode(
            _Vote(part=part, alike=task.alike, same=same, seconds=_seconds(task, written))
        )
        size_bytes = part.file.size_bytes
    except Exception as raised:  # rank 0 waits for a word
        error, vote = raised, msgspec.msgpack.encode(_Vote(**_reason_fields(raised)))
    channel.send([0], _tag(number, 1), vote)
    end = msgspec.msgpack.decode(channel.receive([0], _tag(number, 2))[0], type=_End)
    if error is not None:
        raise error
    if end.reason is not None:
        raise NotPrepared(end.reason, torn=end.torn)
    return size_bytes


def _seconds(task: Task, written: Written) -> tuple[float, float, float]:
    timings = task.timings
    return timings.get("snapshot_seconds", 0.0), timings.get("stall_seconds", 0.0), written.write_seconds


def _slowest(seconds: Mapping[int, tuple[float, float, float]]) -> list[RankSpan]:
    spans = [
        RankSpan(rank=rank, snapshot_seconds=copied, stall_seconds=stalled, persist_seconds=wrote)
        for rank, (copied, stalled, wrote) in seconds.items()
    ]
    return sorted(spans, key=lambda each: -each.snapshot_seconds - each.persist_seconds)[:MOST_RANKS_TOLD]


def _begun(channel: RankChannel, number: int) -> _Begun:
    return msgspec.msgpack.decode(channel.receive([0], _tag(number, 0))[0], type=_Begun)


def require_agreement(by_rank: Mapping[int, Mapping[str, str]]) -> None:
    """NotPrepared when the parts of two ranks are not of the same moment, or of the same job."""
    first: dict[str, tuple[int, str]] = {}
    for rank, known in by_rank.items():
        for key, value in sorted(known.items()):  # what is of another moment differs in the rest as well
            other, theirs = first.setdefault(key, (rank, value))
            if value == theirs:
                continue
            if key == "data":
                raise NotPrepared(
                    f"rank {rank} is at {value}, rank {other} at {theirs}: every rank has to call session.step() "
                    "after the same batches"
                )
            raise NotPrepared(
                f"ranks {other} and {rank} differ in what should be the same on both, such as parameters under "
                "DistributedDataParallel: does every update sum up gradients over all ranks, and does no other "
                "tensor have the same name?"
            )


def _conclude(
    writer: CheckpointWriter,
    task: Task,
    alike: Mapping[int, Mapping[str, str]],
    parts: Iterable[RankShard],
    write_seconds: float,
) -> int:
    """Commit what all ranks have written, if that is a whole of one moment; the bytes of all files."""
    require_agreement(alike)
    whole = merge_ranks(parts, task.origin.world_size)
    manifest = manifest_of(task, whole, write_seconds)
    writer.commit(fmt.encode_manifest(manifest), replace=task.origin.replaces)
    return sum(file.size_bytes for file in whole.files)


def _begun_in(writer: CheckpointWriter, task: Task, state: dict[str, str] | None = None) -> _Begun:
    origin = task.origin
    return _Begun(id=task.id, place=writer.place, attempt=origin.attempt, uid=origin.uid, state=state or {})


def _placed(task: Task, begun: _Begun) -> Task:
    """As a part of what rank 0 has begun: by that place, seals of one checkpoint know each other again."""
    origin = msgspec.structs.replace(task.origin, place=begun.place, attempt=begun.attempt, uid=begun.uid)
    return msgspec.structs.replace(task, origin=origin)


def _size_bytes(task: Task) -> int:
    return task.slots[-1].end if task.slots else 0


def _reason_fields(error: BaseException, where: str = "") -> dict[str, Any]:
    """`where` goes before the reason, unless that says it."""
    where = "" if isinstance(error, (_OtherRankFailed, IncompleteParts)) else where
    return {"reason": where + describe_error(error), "torn": isinstance(error, NotPrepared) and error.torn}


def _digests(state: Mapping[str, Any]) -> dict[str, str]:
    return {key: fmt.digest(msgspec.json.encode(tree)) for key, tree in state.items()}


def _tag(number: int, stage: int) -> int:
    return STAGES * number + stage
