"""The structure of the state of several ranks: exchanged and checked when it changes, otherwise named by digest.

Each rank knows the structures of the newest checkpoints, as far as they concern its group: the ranks that send
their messages to it. When rank 0 begins a checkpoint, it names one. A group of ranks that still stores the same
sends only a digest. Does not import torch.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import msgspec

from holdfast.errors import IncompleteParts
from holdfast.format import manifest as fmt
from holdfast.format.group_structure import GroupStructure, merge_groups, structure_of_rank
from holdfast.format.manifest_files import structure_of
from holdfast.format.shards import names_in
from holdfast.save.draft import Draft

MOST_KEPT = 4
"""Structures that a rank keeps: several checkpoints may be in flight."""


class PartStructure(msgspec.Struct, frozen=True):
    """The stored files and tensors of a rank, or a group of ranks, without the bytes."""

    digest: str
    group: GroupStructure | None = None
    """None if it is that of the structure which rank 0 named."""


class RankStructure:
    """What this rank has stored."""

    def __init__(self, written: Draft) -> None:
        assert written.index is not None
        assert written.index.structure is not None
        self._written = written
        self._refers = {keyword: sorted(names_in(tree)) for keyword, tree in written.state.items()}
        self.digest = fmt.digest(written.index.structure.digest.encode() + msgspec.msgpack.encode(self._refers))

    def group(self) -> GroupStructure:
        """Return it as a group of one rank. Raises IncompleteParts."""
        tensors = list(map(structure_of, self._written.tensors))
        return structure_of_rank(self._written.rank, tensors, self._refers)


class KnownStructures:
    """The structures of the newest durable checkpoints, as one rank knows them. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[str, tuple[str, Sequence[GroupStructure]]] = {}
        """By the structure of all ranks: the digest of that of this rank's group, and what its members store."""

    @property
    def newest(self) -> str:
        """The newest structure; empty before the first checkpoint."""
        with self._lock:
            return next(reversed(self._known), "")

    def merge(
        self, named: str, own: RankStructure, members: Sequence[PartStructure]
    ) -> tuple[PartStructure, Sequence[GroupStructure]]:
        """Return the structure of this rank's group, and that of each member.

        Args:
            named: the structure that rank 0 named.

        Raises:
            IncompleteParts: the parts contradict each other, or one was not sent.
        """
        digests = [own.digest, *(member.digest for member in members)]
        digest = fmt.digest("".join(digests).encode()) if members else own.digest
        with self._lock:
            known, groups = self._known.get(named, ("", ()))
        if digest == known:
            return PartStructure(digest), groups
        found = [_group_of(number, member, groups) for number, member in enumerate(members)]
        return PartStructure(digest, merge_groups([own.group(), *found])), found

    def remember(self, structure: str, digest: str, members: Sequence[GroupStructure]) -> None:
        """Record that a durable checkpoint has a structure.

        Record it before any member of the group does: from then on, a member no longer sends its own part.
        """
        with self._lock:
            self._known.pop(structure, None)
            self._known[structure] = digest, members
            if len(self._known) > MOST_KEPT:
                del self._known[next(iter(self._known))]


def _group_of(number: int, member: PartStructure, known: Sequence[GroupStructure]) -> GroupStructure:
    if member.group is not None:
        return member.group
    if number >= len(known):
        raise IncompleteParts(f"the structure of member {number} of a group of ranks is missing")
    return known[number]
