"""Two-phase commit of a checkpoint that several ranks write.

Rank 0 begins the checkpoint in the store and sends its folder to the other ranks. Every rank writes its part,
makes it durable and votes. When all ranks have voted to commit, rank 0 writes the manifest. If a rank fails or
dies before that, there is no checkpoint; afterwards the checkpoint is complete.

Messages follow `rank_tree`: a leader forwards messages of rank 0, and sends one vote for its group. So no rank
receives more than a few messages, and the work of rank 0 does not grow with ranks × tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from holdfast.checkpoint import stored_manifest
from holdfast.errors import is_full
from holdfast.format import manifest as fmt
from holdfast.format.group_structure import GroupStructure
from holdfast.format.manifest_files import ManifestFile
from holdfast.format.merged_ranks import require_own_files
from holdfast.protocol.field_types import RankCheckpointTimes
from holdfast.save.draft import Draft, state_digests
from holdfast.save.rank_tree import children_of, parent_of
from holdfast.save.rank_votes import OtherRankFailed, Vote, failure_of, merge_votes, reason_fields
from holdfast.save.run import NotPrepared
from holdfast.save.structures import KnownStructures
from holdfast.store import CheckpointWriter, Store

STAGES = 3


_encode = msgspec.msgpack.encode


class RankChannel(Protocol):
    """Messages between ranks, for any thread. Any error means that another rank is lost."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def send(self, to: Sequence[int], tag: int, data: bytes) -> None: ...

    def receive(self, sources: Sequence[int], tag: int) -> list[bytes]: ...


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
    bytes_per_second: float = 0.0
    """Highest write rate of each rank; 0: no limit."""
    structure: str = ""
    """A structure that rank 0 knows: groups of ranks send theirs unless it is that."""
    reason: str | None = None
    torn: bool = False
    again: bool = False
    """It failed, but rank 0 has made room in the store and begins again."""


class _Outcome(msgspec.Struct, frozen=True, kw_only=True):
    structure: str = ""
    """The structure of the checkpoint, which all ranks now know."""
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
        group = _Group(self._channel, number, self._known)
        if group.rank == 0:
            lead = _Lead(group, self._store, draft, write, self._make_room)
            while (files := lead.run(problem)) is None:
                pass
            on_durable(lead.spans)
            return files

        def write_begun(begun: _Begin) -> Draft:
            if problem is not None:
                raise problem
            if begun.id != draft.id:
                raise NotPrepared(f"this rank copied {draft.id}, but rank 0 began {begun.id}")
            return write(_for_folder(draft, begun))

        while (own := _follow(group, write_begun)) is None:
            pass
        return own

    def decline(self, number: int, reason: str) -> None:
        """Fail checkpoint `number` on all ranks, because this rank has no snapshot for it."""
        group, problem = _Group(self._channel, number, self._known), NotPrepared(reason)
        if group.rank == 0:
            group.send(0, _encode(_Begin(**reason_fields(problem, "rank 0: "))))
            return

        def refuse(begun: _Begin) -> Draft:
            raise problem

        with contextlib.suppress(NotPrepared):
            while _follow(group, refuse) is None:
                pass


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
        begun, known = _begin_message(writer, first), KnownStructures()
        written = [write(_for_folder(draft, begun)) for draft in drafts]
        seconds = sum(draft.timings["write_seconds"] for draft in written)
        first = msgspec.structs.replace(written[0], timings=first.timings | {"write_seconds": seconds})
        votes = [merge_votes(begun.structure, known, draft, [])[0] for draft in written[1:]]
        vote, _ = merge_votes(begun.structure, known, written[0], votes)
        return _commit_vote(writer, first, vote)[0].files
    except BaseException:  # also on Ctrl-C: remove the partial checkpoint
        writer.abort()
        raise


class _Group:
    """The ranks that this one exchanges messages with about a checkpoint: its leader, and those it leads."""

    def __init__(self, channel: RankChannel, number: int, known: KnownStructures) -> None:
        self._channel, self._number, self.known = channel, number, known
        self.rank = channel.rank
        self._members = children_of(channel.rank, channel.world_size)

    def send(self, stage: int, message: bytes) -> None:
        """Send a message of rank 0 to the members."""
        try:
            self._channel.send(self._members, self._tag(stage), message)
        except Exception:
            if stage == 0:  # later messages do not change whether the checkpoint is durable
                raise

    def receive(self, stage: int) -> bytes:
        """Receive a message of rank 0 from the leader."""
        return self._channel.receive([parent_of(self.rank)], self._tag(stage))[0]

    def receive_votes(self) -> list[Vote]:
        """Wait until all members have voted."""
        received = self._channel.receive(self._members, self._tag(1))
        return [msgspec.msgpack.decode(data, type=Vote) for data in received]

    def send_vote(self, vote: Vote) -> None:
        self._channel.send([parent_of(self.rank)], self._tag(1), _encode(vote))

    def _tag(self, stage: int) -> int:
        return STAGES * self._number + stage


class _Lead:
    """Rank 0."""

    def __init__(
        self,
        group: _Group,
        store: Store,
        draft: Draft,
        write: Callable[[Draft], Draft],
        make_room: Callable[[Exception], bool],
    ) -> None:
        self._group, self._store = group, store
        self._draft, self._write, self._make_room = draft, write, make_room
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
        self._group.send(2, _encode(_Outcome(structure=structure)))
        return manifest.files

    def _fail(self, stage: int, message: type[_Begin | _Outcome], error: BaseException) -> None:
        """Send the other ranks the reason of a failure, and raise it unless there is room for another try."""
        is_full_store = error.is_full if isinstance(error, OtherRankFailed) else is_full(error)
        again = isinstance(error, Exception) and is_full_store and self._make_room(error)
        self._group.send(stage, _encode(message(**reason_fields(error, "rank 0: "), again=again)))
        if not again:
            raise error

    def _commit(self, writer: CheckpointWriter) -> tuple[ManifestFile, str]:
        """Return the manifest, and the structure, which this rank then knows."""
        group, draft = self._group, self._draft
        begun = _begin_message(writer, draft, group.known.newest)
        group.send(0, _encode(begun))
        vote, written, members, error = _vote_of(group, begun, lambda: self._write(_for_folder(draft, begun)))
        if error is not None and vote.failure is not None and vote.failure.rank == group.rank:
            raise error
        if vote.failure is not None:
            raise OtherRankFailed(vote.failure.reason, torn=vote.failure.torn, is_full=vote.failure.is_full)
        assert written is not None
        self.spans = vote.slowest
        manifest, structure = _commit_vote(writer, written, vote)
        group.known.remember(structure, structure, members)
        return manifest, structure


def _follow(group: _Group, write: Callable[[_Begin], Draft]) -> Sequence[fmt.File] | None:
    """Return the files of this rank; None when all ranks write again."""
    message = group.receive(0)
    group.send(0, message)
    begun = msgspec.msgpack.decode(message, type=_Begin)
    if begun.again:
        return None
    if begun.reason is not None:
        raise NotPrepared(begun.reason, torn=begun.torn)
    vote, written, members, error = _vote_of(group, begun, lambda: write(begun))
    group.send_vote(vote)
    message = group.receive(2)
    end = msgspec.msgpack.decode(message, type=_Outcome)
    if vote.structure is not None and end.reason is None and not end.again:
        group.known.remember(end.structure, vote.structure.digest, members)
    group.send(2, message)
    if end.again:
        return None
    if error is not None:
        raise error
    if end.reason is not None:
        raise NotPrepared(end.reason, torn=end.torn)
    assert written is not None
    return written.files


def _vote_of(
    group: _Group, begun: _Begin, write: Callable[[], Draft]
) -> tuple[Vote, Draft | None, Sequence[GroupStructure], Exception | None]:
    """Write this rank's part, and wait for the votes of the members of its group.

    Returns:
        The vote of all of them; this rank's part; the structure of each member; what failed on this rank.
    """
    written, error = None, None
    try:
        written = write()
    except Exception as raised:  # the leader waits for a vote, and the folder is removed once no rank writes
        error = raised
    votes = group.receive_votes()
    failures = [vote.failure for vote in votes if vote.failure is not None]
    if written is not None and not failures:
        try:
            vote, members = merge_votes(begun.structure, group.known, written, votes)
        except Exception as raised:  # as above
            error = raised
        else:
            return vote, written, members, None
    if error is not None:
        failures.append(failure_of(error, group.rank))
    return Vote(failure=min(failures)), written, [], error


def _commit_vote(writer: CheckpointWriter, draft: Draft, vote: Vote) -> tuple[ManifestFile, str]:
    """Check what all ranks have stored, and commit; return the manifest and the structure."""
    assert vote.structure is not None
    if vote.structure.group is not None:
        vote.structure.group.require_complete()
    require_own_files([[file.name for file in index.files] for index in vote.indexes], draft.world_size)
    manifest = ManifestFile(**fmt.description_of(draft), ranks=vote.indexes)
    stored_manifest.commit(writer, manifest, replace=draft.replaces)
    return manifest, vote.structure.digest


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
        bytes_per_second=draft.bytes_per_second,
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
        bytes_per_second=begun.bytes_per_second,
    )


def _size_bytes(draft: Draft) -> int:
    """Return about how many bytes the rank will write."""
    links = draft.parent is not None and draft.may_link
    written = (slot for slot in draft.slots if not (links and slot.name in draft.unchanged))
    return sum(slot.end - slot.start for slot in written) + draft.image_bytes
