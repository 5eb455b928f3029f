"""How the manifest of a checkpoint is stored. Does not import torch.

    manifest.json                       what is known of the checkpoint, with the digest of each file below
    rank-<r>.structure-<digest>.json    for each rank: name, dtype, shape and place of its tensors
    rank-<r>.index.json                 for each rank: its files, the digests of its tensors, its state

Only several ranks have the last two: each rank writes its index next to its payload, and links its structure as
long as it does not change. `manifest.json` of one rank contains both. It ends with the digest of all bytes before,
so that it covers, by way of the digests in it, every byte of the checkpoint.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import field

from holdfast.errors import DamagedCheckpoint, UnknownFormat
from holdfast.format.manifest import (
    DIGEST,
    FORMAT,
    ITEM_BYTES,
    MANIFEST,
    CheckpointDescription,
    File,
    FileSummary,
    Manifest,
    Tensor,
    description_of,
    digest,
    summary_of,
    zeros,
)
from holdfast.protocol.wire import Origin
from holdfast.retention import LoggedMetric

DIGEST_ENTRY = b',\n "manifest_digest": "%b"\n}\n'
"""The end of a manifest. It detects, for example, a flipped bit in a learning rate."""
_FOUND_ENTRY = re.compile(DIGEST_ENTRY % b"([0-9a-f]{32})")
_ENTRY_BYTES = len(DIGEST_ENTRY % bytes(32))
_LAST = "manifest_digest"
_ABSENT_IF_EMPTY = ("origin", "inexact", "left_out", "structure", "index", "ranks")


class TensorStructure(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A tensor that a rank stores, or its shard of one, without its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    global_shape: tuple[int, ...] | None
    """Shape of the whole tensor; None if the rank stores all of it."""
    offsets: tuple[int, ...] | None
    view: str | None
    is_own: bool
    """Whether only this rank uses it."""

    def placed(self, rank: int, file: str, start: int, end: int, found: str, chunks: list[str] | None) -> Tensor:
        """Return the tensor with its place in a file and its digest."""
        return Tensor(
            name=self.name,
            dtype=self.dtype,
            shape=self.shape,
            global_shape=self.shape if self.global_shape is None else self.global_shape,
            offsets=zeros(len(self.shape)) if self.offsets is None else self.offsets,
            file=file,
            start=start,
            end=end,
            digest=found,
            chunks=chunks,
            view=self.view,
            rank=rank if self.is_own else None,
        )


def structure_of(tensor: Tensor) -> TensorStructure:
    """Return what the structure says of a tensor."""
    is_whole = tensor.global_shape == tensor.shape and not any(tensor.offsets)
    return TensorStructure(
        tensor.name,
        tensor.dtype,
        tensor.shape,
        None if is_whole else tensor.global_shape,
        None if is_whole else tensor.offsets,
        tensor.view,
        tensor.rank is not None,
    )


Structure = list[list[TensorStructure]]
"""The tensors of each rank, by rank."""


class RankIndex(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank stored."""

    files: list[File]
    tensors: dict[str, list[tuple[int, int]]]
    """By file, which tensors are in it, in their order: first and last number of those that follow each other in
    the structure of the rank. They lie back to back behind the header."""
    digests: list[str]
    """Digest of each tensor, in the order of the structure."""
    chunks: dict[int, list[str]] = {}
    """Digests of the chunks of larger tensors, by number."""
    state: dict[str, Any]
    """State of the objects; of ranks other than 0, only entries that differ from those of rank 0."""


class StoredPart(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the manifest that is stored in a file next to it."""

    size_bytes: int
    digest: str


class RankEntry(StoredPart, frozen=True, kw_only=True, omit_defaults=True):
    """The index of one rank, its structure, and its files in short."""

    files: list[FileSummary]
    structure: StoredPart | None = None
    """The file with the structure of the rank; absent if one file has those of all ranks."""


class ManifestFile(CheckpointDescription, frozen=True, kw_only=True):
    """The content of `manifest.json`."""

    digest: str = DIGEST
    origin: Origin | None = None
    """The checkpoint that it is a copy of, in a forked job; otherwise absent."""
    structure: Structure | StoredPart | None = None
    """The structure of one rank; absent where each rank has a file. Earlier versions wrote one file for all."""
    index: RankIndex | None = None
    """The index of the only rank; absent if there are several."""
    ranks: list[RankEntry] = field(default_factory=list)
    """The files with the indexes of several ranks, by rank."""
    manifest_digest: str | msgspec.UnsetType = msgspec.UNSET
    """Digest of the bytes before this last entry."""

    @property
    def files(self) -> Sequence[File | FileSummary]:
        """The files of all ranks."""
        return self.index.files if self.index is not None else [file for each in self.ranks for file in each.files]


class _IndexedFiles(msgspec.Struct, frozen=True):
    files: list[File]


class ManifestSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What retention compares of a manifest; decoding it takes a tenth of the time."""

    job: str
    iteration: int
    lineage: int
    attempt: int
    metrics: dict[str, LoggedMetric] = {}
    ranks: list[RankEntry] = []
    index: _IndexedFiles | None = None

    @property
    def files(self) -> Sequence[File | FileSummary]:
        """The files of all ranks."""
        return self.index.files if self.index is not None else [file for each in self.ranks for file in each.files]


class _FormatNumber(msgspec.Struct):
    format: int


T = TypeVar("T")
M = TypeVar("M", ManifestFile, ManifestSummary)


def structure_name(part: StoredPart, rank: int | None = None) -> str:
    """Return the name of the file with the structure of a rank, or of all ranks."""
    return f"{'' if rank is None else f'rank-{rank}.'}structure-{part.digest[:12]}.json"


def index_name(rank: int) -> str:
    """Return the name of the file with the index of a rank."""
    return f"rank-{rank}.index.json"


def part_of(data: bytes) -> StoredPart:
    """Return the entry of a file that contains `data`."""
    return StoredPart(size_bytes=len(data), digest=digest(data))


def rank_entry(data: bytes, structure: StoredPart, files: Sequence[File]) -> RankEntry:
    """Return the entry of a rank, whose index is `data`."""
    part, summaries = part_of(data), list(map(summary_of, files))
    return RankEntry(size_bytes=part.size_bytes, digest=part.digest, files=summaries, structure=structure)


def index_of(files: Sequence[File], tensors: Sequence[Tensor], state: dict[str, Any]) -> RankIndex:
    """Return the index of a rank, given its tensors in the order of its structure."""
    numbers: dict[str, list[int]] = {file.name: [] for file in files}
    for number, tensor in enumerate(tensors):
        numbers[tensor.file].append(number)
    for held in numbers.values():
        held.sort(key=lambda number: (tensors[number].start, tensors[number].end))
    return RankIndex(
        files=list(files),
        tensors={name: list(_runs(held)) for name, held in numbers.items()},
        digests=[tensor.digest for tensor in tensors],
        chunks={number: tensor.chunks for number, tensor in enumerate(tensors) if tensor.chunks is not None},
        state=state,
    )


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the first and the last of numbers that follow each other."""
    first = None
    for number, following in itertools.zip_longest(numbers, numbers[1:]):
        first = number if first is None else first
        if following != number + 1:
            yield first, number
            first = None


def encode_structure(tensors: Sequence[TensorStructure]) -> bytes:
    """Encode the structure of a rank as JSON, one line per tensor."""
    lines = msgspec.json.Encoder().encode_lines(tensors)[:-1]
    return b"[\n  %b\n ]" % lines.replace(b"\n", b",\n  ") if lines else b"[]"


def encode_index(index: RankIndex) -> bytes:
    """Encode as JSON."""
    return msgspec.json.encode(index)


def encode_manifest(manifest: ManifestFile) -> bytes:
    """Encode as JSON, one line per entry or tensor, followed by the digest."""
    values = {name: getattr(manifest, name) for name in ManifestFile.__struct_fields__ if name != _LAST}
    entries = {name: _lines(value) for name, value in values.items() if value or name not in _ABSENT_IF_EMPTY}
    if isinstance(manifest.structure, list):
        entries["structure"] = b"[%b]" % b",\n ".join(map(encode_structure, manifest.structure))
    body = b"{\n " + b",\n ".join(b'"%b": %b' % (name.encode(), data) for name, data in entries.items())
    return body + DIGEST_ENTRY % digest(body).encode()


def _lines(value: Any) -> bytes:
    """Encode as JSON, one line per item of a list."""
    encode = msgspec.json.encode
    if not value or not isinstance(value, list):
        return encode(value)
    return b"[\n  %b\n ]" % b",\n  ".join(map(encode, value))


def manifest_digest(data: bytes) -> str:
    """Return the digest at the end of a valid manifest, which identifies the content of its checkpoint."""
    end = _FOUND_ENTRY.fullmatch(data[-_ENTRY_BYTES:])
    assert end is not None
    return end[1].decode()


def decode_manifest(kind: type[M], data: bytes, file: str = MANIFEST) -> M:
    """Parse a manifest, or a part of it.

    Raises:
        UnknownFormat: another version of Holdfast wrote it.
        DamagedCheckpoint: it is not a manifest, or differs from what was written.
    """
    body, end = data[:-_ENTRY_BYTES], _FOUND_ENTRY.fullmatch(data[-_ENTRY_BYTES:])
    if end is not None and digest(body).encode() != end[1]:
        raise DamagedCheckpoint(file, "does not match its digest")
    number = _decoded(_FormatNumber, data, file, "is not a manifest").format
    if number != FORMAT:
        raise UnknownFormat(f"{file}: checkpoint format {number!r}; {_advice(number)}")
    if end is None:
        raise DamagedCheckpoint(file, "is not a manifest that ends with its digest")
    return _decoded(kind, body + b"}", file, f"is not a manifest of format {FORMAT}")


def _advice(number: int) -> str:
    reads = f"this Holdfast reads format {FORMAT}"
    if number > FORMAT:
        return f"{reads}: upgrade holdfast to restore it"
    return f"{reads}. A version before its first release wrote it: give the job another name, or another store"


def _decoded(kind: type[T], data: bytes, file: str, what: str) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedCheckpoint(file, f"{what}: {error}") from error


def parts_of(root: ManifestFile, only: int | None = None) -> dict[str, StoredPart]:
    """Return the files next to a manifest that have parts of it, by name; with `only`, of one rank."""
    parts = {structure_name(root.structure): root.structure} if isinstance(root.structure, StoredPart) else {}
    for rank, entry in enumerate(root.ranks):
        if only in (None, rank):
            parts[index_name(rank)] = entry
            if entry.structure is not None:
                parts[structure_name(entry.structure, rank)] = entry.structure
    return parts


def assemble(root: ManifestFile, files: Mapping[str, bytes], only: int | None = None) -> Manifest:
    """Return the manifest, given the content of the files with its parts.

    Args:
        only: a rank; files and tensors of others, and all states, are then left out.

    Raises:
        DamagedCheckpoint: the parts contradict each other.
    """
    count = len(root.ranks) + (root.index is not None)
    structure = _structures(root, files, only)
    if not len(structure) == count == root.world_size:
        counts = f"{len(structure)} structures and {count} indexes"
        raise DamagedCheckpoint(MANIFEST, f"has {counts} of {root.world_size} ranks")
    ranks = [rank for rank in range(count) if only in (None, rank)]
    indexes = {rank: _index(root, rank, files) for rank in ranks}
    states = {rank: index.state for rank, index in indexes.items()} if only is None else {}
    return Manifest(
        **description_of(root),
        digest=root.digest,
        files=[file for index in indexes.values() for file in index.files],
        tensors=[each for rank, index in indexes.items() for each in _placed(rank, structure[rank], index)],
        state=states.pop(0, {}),
        rank_states={str(rank): state for rank, state in states.items() if state},
        origin=root.origin,
    )


def _structures(root: ManifestFile, files: Mapping[str, bytes], only: int | None) -> Structure:
    """Return the tensors of each rank; with `only`, of others none."""
    if isinstance(root.structure, list):
        return root.structure
    if root.structure is not None:
        name = structure_name(root.structure)
        return _decoded(Structure, files[name], name, "is not a structure")
    found: Structure = []
    for rank, entry in enumerate(root.ranks):
        if entry.structure is None:
            break
        name = structure_name(entry.structure, rank)
        is_read = only in (None, rank)
        found.append(_decoded(list[TensorStructure], files[name], name, "is not a structure") if is_read else [])
    return found


def _index(root: ManifestFile, rank: int, files: Mapping[str, bytes]) -> RankIndex:
    if root.index is not None:
        return root.index
    name = index_name(rank)
    index = _decoded(RankIndex, files[name], name, "is not an index")
    if list(map(summary_of, index.files)) != root.ranks[rank].files:
        raise DamagedCheckpoint(name, "does not have the files that the manifest lists")
    return index


def _placed(rank: int, tensors: Sequence[TensorStructure], index: RankIndex) -> list[Tensor]:
    """Return the tensors of a rank with their places and digests."""
    found = dict[int, Tensor]()
    if len(index.digests) != len(tensors):
        raise _contradiction(rank, f"has {len(index.digests)} digests for {len(tensors)} tensors")
    if unknown := index.tensors.keys() - {file.name for file in index.files}:
        raise _contradiction(rank, f"has tensors in {min(unknown)!r}, which it does not list")
    for file in index.files:
        at = file.header_bytes
        for first, last in index.tensors.get(file.name, ()):
            for number in range(first, last + 1):
                if not 0 <= number < len(tensors) or number in found:
                    raise _contradiction(rank, f"has no tensor {number}, or has it twice")
                tensor = tensors[number]
                if (item_bytes := ITEM_BYTES.get(tensor.dtype)) is None:
                    raise _contradiction(rank, f"has tensor {tensor.name} of the unknown dtype {tensor.dtype!r}")
                end = at + item_bytes * math.prod(tensor.shape)
                found[number] = tensor.placed(
                    rank, file.name, at, end, index.digests[number], index.chunks.get(number)
                )
                at = end
    if len(found) != len(tensors):
        raise _contradiction(rank, f"has places for {len(found)} of {len(tensors)} tensors")
    return [found[number] for number in range(len(tensors))]


def _contradiction(rank: int, reason: str) -> DamagedCheckpoint:
    return DamagedCheckpoint(MANIFEST, f"the index of rank {rank} {reason}")
