"""Reports of ranks on their parts of a checkpoint, alone and as a group. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from holdfast.errors import IncompleteParts, describe_error, is_full
from holdfast.format.group_structure import GroupStructure
from holdfast.format.manifest_files import RankEntry
from holdfast.protocol.field_types import RankCheckpointTimes
from holdfast.protocol.wire import MOST_RANK_SPANS
from holdfast.save.draft import Draft
from holdfast.save.run import NotPrepared
from holdfast.save.structures import KnownStructures, PartStructure, RankStructure


class OtherRankFailed(NotPrepared):
    """Another rank, named in the message, failed; with `is_full`, all that failed found the store full."""

    def __init__(self, message: str, *, torn: bool, is_full: bool) -> None:
        super().__init__(message, torn=torn)
        self.is_full = is_full


class Failure(msgspec.Struct, frozen=True, order=True):
    """Reason why a rank has no durable part; of several, the smallest is reported."""

    is_full: bool
    """The store is full. Other reasons are reported first: more room does not remove them."""
    rank: int
    reason: str
    torn: bool


Agreed = dict[str, tuple[int, str]]
"""Values that must be equal on all ranks that report the same key, each with the lowest of them."""


class Vote(msgspec.Struct, frozen=True, kw_only=True):
    """The durable parts of a group of ranks, or the reason why one is missing."""

    indexes: list[RankEntry] = []
    """Of each rank, in their order."""
    structure: PartStructure | None = None
    must_match: Agreed = {}
    slowest: list[RankCheckpointTimes] = []
    """Durations of the slowest ranks, slowest first."""
    failure: Failure | None = None


def merge_votes(
    named: str, known: KnownStructures, written: Draft, votes: Sequence[Vote]
) -> tuple[Vote, Sequence[GroupStructure]]:
    """Return the vote of a rank and of the members of its group, and the structure of each member.

    Raises:
        NotPrepared, IncompleteParts: the parts do not belong to one checkpoint.
    """
    assert written.index is not None
    own = {key: (written.rank, value) for key, value in written.must_match.items()}
    structures = [vote.structure for vote in votes if vote.structure is not None]
    structure, members = known.merge(named, RankStructure(written), structures)
    merged = Vote(
        indexes=[written.index, *(index for vote in votes for index in vote.indexes)],
        structure=structure,
        must_match=_agreed([own, *(vote.must_match for vote in votes)]),
        slowest=_slowest([_times(written), *(times for vote in votes for times in vote.slowest)]),
    )
    return merged, members


def failure_of(error: Exception, rank: int) -> Failure:
    return Failure(is_full=is_full(error), rank=rank, **reason_fields(error, f"rank {rank}: "))


def _times(written: Draft) -> RankCheckpointTimes:
    copied, stalled, wrote = _seconds(written)
    return RankCheckpointTimes(
        rank=written.rank, snapshot_seconds=copied, stall_seconds=stalled, persist_seconds=wrote
    )


def _seconds(written: Draft) -> tuple[float, float, float]:
    timings = written.timings
    return timings.get("snapshot_seconds", 0.0), timings.get("stall_seconds", 0.0), timings["write_seconds"]


def _slowest(times: Iterable[RankCheckpointTimes]) -> list[RankCheckpointTimes]:
    return sorted(times, key=lambda each: -each.snapshot_seconds - each.persist_seconds)[:MOST_RANK_SPANS]


def require_agreement(by_rank: Mapping[int, Mapping[str, str]]) -> None:
    """Raise NotPrepared when two ranks have different `must_match` values: their parts are of different states."""
    _agreed({key: (rank, value) for key, value in values.items()} for rank, values in by_rank.items())


def _agreed(groups: Iterable[Agreed]) -> Agreed:
    """Return the values of several groups of ranks. Raises NotPrepared when two have different ones."""
    found: Agreed = {}
    for values in groups:
        for key, (rank, value) in sorted(values.items()):  # "data" first: if it differs, the rest does too
            other, expected = found.setdefault(key, (rank, value))
            if value == expected:
                continue
            if key == "data":
                raise NotPrepared(
                    f"rank {rank} is at {value}, rank {other} at {expected}: every rank must call session.step() "
                    "after the same batches"
                )
            raise NotPrepared(
                f"ranks {other} and {rank} have different values for replicated state, such as parameters under "
                "DistributedDataParallel: check that every forward pass calls the DistributedDataParallel and not "
                "the module inside it, that every update reduces gradients over all ranks, and that no other "
                "tensor has the same name"
            )
    return found


def reason_fields(error: BaseException, where: str = "") -> dict[str, Any]:
    """Return the fields of a message about an error, prefixed by `where` unless the error names its rank."""
    where = "" if isinstance(error, (OtherRankFailed, IncompleteParts)) else where
    return {"reason": where + describe_error(error), "torn": isinstance(error, NotPrepared) and error.torn}
