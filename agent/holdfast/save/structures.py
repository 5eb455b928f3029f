"""The structure of the state of several ranks: exchanged and checked when it changes, otherwise named by digest.

Rank 0 keeps the structures of the newest checkpoints, and names one when it begins a checkpoint. A rank whose part
of it has not changed sends only the digest of its part. Does not import torch.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from holdfast.checkpoint.stored_manifest import copies_of
from holdfast.errors import DamagedCheckpoint, IncompleteParts
from holdfast.format import manifest as fmt
from holdfast.format import manifest_files
from holdfast.format.manifest_files import StoredPart, structure_name, structure_of
from holdfast.format.shards import RankStructure, names_in, require_complete_ranks
from holdfast.save.draft import Draft
from holdfast.store import CheckpointWriter, Store

T = TypeVar("T")
MOST_KEPT = 4
"""Structures that a rank keeps: several checkpoints may be in flight."""


def rank_structure(draft: Draft) -> RankStructure:
    """Return what a rank has stored, and what its trees refer to."""
    refers = {keyword: sorted(names_in(tree)) for keyword, tree in draft.state.items()}
    return RankStructure(list(map(structure_of, draft.tensors)), refers)


def digest_of(structure: RankStructure) -> str:
    return fmt.digest(msgspec.msgpack.encode(structure))


@dataclass(frozen=True, slots=True)
class CompleteStructure:
    """The structures of all ranks, which are complete together."""

    ranks: Sequence[RankStructure]
    digests: Sequence[str]
    """Digest of each of them."""
    data: bytes
    """The file that is stored."""

    @property
    def key(self) -> str:
        """Identifies it among ranks."""
        return fmt.digest("".join(self.digests).encode())

    @property
    def stored(self) -> StoredPart:
        return manifest_files.part_of(self.data)


class KnownStructures:
    """The structures of the newest durable checkpoints, as one rank knows them. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._complete: dict[str, tuple[CompleteStructure, str]] = {}
        """On rank 0, with the newest checkpoint that has it, by key."""
        self._own: dict[str, str] = {}
        """Digest of this rank's part of each, by key."""

    @property
    def newest(self) -> str:
        """Key of the newest structure that rank 0 knows; empty before the first checkpoint."""
        with self._lock:
            return next(reversed(self._complete), "")

    def has_own(self, key: str, digest: str) -> bool:
        """Return whether `digest` is that of this rank's part of the structure `key`, which rank 0 then knows."""
        with self._lock:
            return self._own.get(key) == digest

    def remember_own(self, key: str, digest: str) -> None:
        with self._lock:
            _put(self._own, key, digest)

    def remember(self, structure: CompleteStructure, checkpoint: str) -> None:
        """Record on rank 0 that a durable checkpoint has this structure."""
        with self._lock:
            _put(self._complete, structure.key, (structure, checkpoint))

    def checkpoint_with(self, structure: CompleteStructure) -> str | None:
        """Return the newest checkpoint that has a structure."""
        with self._lock:
            found = self._complete.get(structure.key)
            return found[1] if found is not None else None

    def merge(self, key: str, parts: Sequence[tuple[str, RankStructure | None]]) -> CompleteStructure:
        """Return the structure of all ranks on rank 0.

        Args:
            key: the structure that was named when the checkpoint began.
            parts: for each rank, the digest of its part, and the part unless it is that of the named structure.

        Raises:
            IncompleteParts: a part is missing, or they are not complete together.
        """
        with self._lock:
            known = self._complete[key][0] if key in self._complete else None
        digests = [digest for digest, _ in parts]
        if known is not None and digests == known.digests:
            return known
        ranks = []
        for rank, (digest, part) in enumerate(parts):
            if part is None and known is not None and known.digests[rank] == digest:
                part = known.ranks[rank]
            if part is None:
                raise IncompleteParts(f"the part of rank {rank} of {len(parts)} is missing")
            ranks.append(part)
        require_complete_ranks(ranks)
        return CompleteStructure(ranks, digests, manifest_files.encode_structure([each.tensors for each in ranks]))


def _put(known: dict[str, T], key: str, value: T) -> None:
    known.pop(key, None)
    known[key] = value
    if len(known) > MOST_KEPT:
        del known[next(iter(known))]


def store_structure(
    writer: CheckpointWriter,
    store: Store,
    job: str,
    structure: CompleteStructure,
    source: str | None,
    *,
    copied: bool,
) -> None:
    """Link the file of a structure from the checkpoint `source`, or else write it; with its copies.

    Raises what `CheckpointWriter.write` does.
    """
    name = structure_name(structure.stored)
    for each in (name, *(copies_of(name) if copied else ())):
        if source is None or not _link(writer, store, job, source, each, len(structure.data)):
            writer.write(each, [structure.data])


def _link(writer: CheckpointWriter, store: Store, job: str, source: str, name: str, size_bytes: int) -> bool:
    try:
        with store.open_file(job, source, name) as opened:
            if opened.size_bytes != size_bytes:
                return False
        writer.copy_file(job, source, name, only_link=True)
    except (DamagedCheckpoint, OSError):
        return False
    return True
