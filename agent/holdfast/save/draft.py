"""The description of one rank's part of a checkpoint, without the bytes. Does not import torch.

A draft is made once, at the decision. The copy and the write complete it; it is then the content of the completion
marker, and with the parts of all ranks it becomes the manifest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import field

from holdfast.format import manifest as fmt
from holdfast.format.encoding import CODEC
from holdfast.format.manifest import Shard, TensorRange
from holdfast.format.manifest_files import ManifestFile, RankEntry, index_of, structure_of
from holdfast.format.parity_file import ParityCode
from holdfast.protocol.ids import checkpoint_id
from holdfast.protocol.wire import CheckpointKind

if TYPE_CHECKING:
    from holdfast.format.merged_ranks import MergedRanks, RankShard


class Draft(fmt.CheckpointDescription, frozen=True, kw_only=True):
    """One rank's description of a checkpoint: the content of its manifest, and how to write it."""

    kind: CheckpointKind
    uid: str = ""
    """The attempt's identifier in its own store."""
    rank: int = 0
    replaces: bool = False
    """Replaces a damaged checkpoint of the same name."""
    may_link: bool = True
    """Whether files of `parent` may be linked; False after damage was found."""
    parity: ParityCode | None = None
    """Strength of the parity files to write; `None` for none."""
    compress: bool = False
    """Whether files are encoded where that makes them smaller."""
    transform: str = CODEC
    """Name of the file transform that encodes them."""
    bytes_per_second: float = 0.0
    """Highest write rate of each rank; 0: no limit."""

    # completed by the copy
    state: dict[str, Any] = field(default_factory=dict)
    slots: list[TensorRange] = field(default_factory=list)
    image_bytes: int = 0
    """Size of the tensors that are in no slot, since a forked child writes them."""
    views: dict[str, str] = field(default_factory=dict)
    shards: dict[str, Shard] = field(default_factory=dict)
    """Position of each sharded tensor in its global tensor, by name."""
    rank_local: set[str] = field(default_factory=set)
    """Names of tensors that may differ between ranks."""
    must_match: dict[str, str] = field(default_factory=dict)
    """Values that must be equal on all ranks that report the same key; otherwise the commit fails."""
    unchanged: set[str] = field(default_factory=set)
    """Names of tensors that probably equal those of the parent. The writer compares their digests."""

    # completed by the write
    folder: str | None = None
    """Folder in the store in which rank 0 began the checkpoint; `None` if this process writes all of it."""
    first_state: dict[str, str] = field(default_factory=dict)
    """Digests of the entries of rank 0's state: other ranks store those that differ. Empty on rank 0."""
    files: list[fmt.File] = field(default_factory=list)
    """All files of the rank, linked ones included."""
    tensors: list[fmt.Tensor] = field(default_factory=list)
    """Digest and place of each tensor, in the order of `slots`."""
    index: RankEntry | None = None
    """The index and the structure of the rank; `None` if this process writes all of the checkpoint."""
    encode_seconds: float = 0.0
    """Part of the write in which files were encoded."""
    not_linked: str | None = None
    """Why a file of the parent was written again; `None` if none was."""

    @property
    def id(self) -> str:
        return checkpoint_id(self.iteration, self.lineage)

    @property
    def size_bytes(self) -> int:
        return self.slots[-1].end if self.slots else 0

    @property
    def part(self) -> RankShard:
        """The part that this rank stored, once it is written."""
        from holdfast.format.merged_ranks import RankShard

        file, *more = self.files
        return RankShard(rank=self.rank, file=file, tensors=self.tensors, state=self.state, more_files=more)

    @property
    def own_state(self) -> dict[str, Any]:
        """The entries of the state that this rank stores."""
        if not self.first_state:
            return self.state
        own = state_digests(self.state)
        absent = dict.fromkeys(self.first_state.keys() - own.keys(), fmt.ABSENT)
        return {key: tree for key, tree in self.state.items() if own[key] != self.first_state.get(key)} | absent

    def header(self, slots: Sequence[TensorRange] | None = None) -> bytes:
        """Return the safetensors header of a file with all tensors, or only `slots`."""
        names = {"job": self.job, "iteration": str(self.iteration), "rank": str(self.rank)}
        return fmt.payload_header(self.slots if slots is None else slots, names)


def state_digests(state: Mapping[str, Any]) -> dict[str, str]:
    """Return the digest of each entry, as JSON, in which 1, 1.0 and true differ."""
    return {key: fmt.digest(msgspec.json.encode(tree)) for key, tree in state.items()}


def manifest_file_of(draft: Draft) -> ManifestFile:
    """Build the content of the manifest of a checkpoint that one rank wrote."""
    structure = [list(map(structure_of, draft.tensors))]
    index = index_of(draft.files, draft.tensors, draft.state)
    return ManifestFile(**fmt.description_of(draft), structure=structure, index=index)


def manifest_of(draft: Draft, ranks: MergedRanks) -> fmt.Manifest:
    """Build the manifest from the draft of rank 0 and the merged parts of all ranks."""
    return fmt.Manifest(**fmt.description_of(draft), **msgspec.structs.asdict(ranks))
