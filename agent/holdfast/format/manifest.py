"""What a checkpoint consists of: safetensors payloads, tensors and state with digests. Does not import torch.

The payload is a plain safetensors file (8 bytes of header length, JSON header, adjacent tensors). It is laid out
here and not by the safetensors library, because a snapshot's buffer already is the data section, which is written
in a few large writes, without a copy or work per tensor.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import msgspec
import xxhash

from holdfast.errors import DamagedCheckpoint
from holdfast.format.encoding import LAYERED, Encoding
from holdfast.format.parity_file import ParityFile
from holdfast.protocol.wire import LeftOutData, Origin
from holdfast.retention import LoggedMetric

FORMAT = 2
MANIFEST = "manifest.json"
REGION_SUFFIX = ".rows"
"""How the names of files end that are laid over others. They consist of a header, for digests of the manifest."""
DIGEST = "xxh3-128"
CHUNK_BYTES = 16 << 20
"""Maximum size of the range that one digest covers, and so the precision with which damage is located."""
BLOCK_BYTES = 4096
"""Alignment of addresses, offsets and lengths for direct I/O."""

ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
PAIRS = {"complex128": "F64", "complex32": "F16"}
"""The stored dtype of views whose elements are pairs; any other view consists of single bytes."""


class Tensor(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A tensor, or the shard of it that one rank stored, and its range in a file."""

    name: str
    dtype: str
    """Name of the dtype in safetensors: F32, BF16, I64 …"""
    shape: tuple[int, ...]
    """Shape of this shard."""
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    """Offsets of this shard in the global tensor, one per dimension."""
    file: str
    start: int
    """Offset of the first byte in the file."""
    end: int
    """Offset after the last byte in the file."""
    digest: str
    """Digest of the bytes; for a tensor larger than a chunk, the digest of the concatenated chunk digests."""
    chunks: list[str] | None = None
    """Digest of each 16 MiB chunk of a larger tensor."""
    view: str | None = None
    """The torch dtype to view the stored elements as, where safetensors lacks it: complex128."""
    rank: int | None = None
    """The only rank that uses this tensor; None for a tensor that all ranks share."""


class File(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    name: str
    size_bytes: int
    header_bytes: int
    """Size of the length field and the JSON header, before the tensors."""
    header_digest: str
    parity: ParityFile | None = None
    """The file with which damage to this one can be repaired; None without parity."""
    written_by: str | None = None
    """The earlier checkpoint that wrote this file, which has the same name there; None if this one did."""
    encoding: Encoding | None = None
    """How the file is stored; None as it is. Positions and digests of tensors are those of the plain file."""

    @property
    def raw_bytes(self) -> int:
        """Size of the plain file."""
        return self.size_bytes if self.encoding is None else self.encoding.raw_bytes

    @property
    def keeps_positions(self) -> bool:
        """Whether the bytes of the plain file are at the same positions of the stored one, or laid over it."""
        return self.encoding is None or self.encoding.codec == LAYERED

    @property
    def stored_bytes(self) -> int:
        """Size with the parity file."""
        return self.size_bytes + (self.parity.size_bytes if self.parity is not None else 0)


class FileSummary(msgspec.Struct, frozen=True, array_like=True):
    """What a store holds of a payload file: what retention and reports count."""

    name: str
    size_bytes: int
    stored_bytes: int
    """Size with the parity file."""
    raw_bytes: int
    """Size of the plain file."""
    written_by: str | None
    """As in `File`."""


def summary_of(file: File) -> FileSummary:
    return FileSummary(file.name, file.size_bytes, file.stored_bytes, file.raw_bytes, file.written_by)


class CheckpointDescription(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a checkpoint without its tensors: the fields that its draft and its manifest share."""

    format: Literal[2] = 2
    job: str
    iteration: int
    """The state is that after the optimizer step of this iteration."""
    lineage: int
    attempt: int
    kind: str
    """Why it was taken: scheduled, requested, safety or final."""
    created_at: float
    """Seconds since the epoch, for display only."""
    parent: str | None
    """The previous checkpoint of its lineage, or the one that its lineage began from."""
    world_size: int
    timings: dict[str, float] = {}
    versions: dict[str, str] = {}
    fingerprint: dict[str, str] = {}
    """Environment on which bitwise results depend: devices, threads, flags … Compared on resume."""
    metrics: dict[str, LoggedMetric] = {}
    """Newest finite value of each metric that the attempt logged on this lineage up to `iteration`, by name."""
    inexact: str | None = None
    """The checkpoint whose degraded restore its state descends from; absent from the file if it is exact."""
    left_out: tuple[LeftOutData, ...] = ()
    """Data that restores left out on the way to its state, oldest first; absent from the file if there is none."""


def description_of(checkpoint: CheckpointDescription) -> dict[str, Any]:
    """Return the fields that a draft and a manifest share."""
    return {name: getattr(checkpoint, name) for name in CheckpointDescription.__struct_fields__}


class Manifest(CheckpointDescription, frozen=True, kw_only=True):
    """All that is known of a complete checkpoint; `manifest_files` stores it."""

    digest: str = DIGEST
    files: list[File]
    tensors: list[Tensor]
    state: dict[str, Any]
    """State of the objects: JSON with `{"$tensor": name}` instead of a tensor, and other `$` tags for types
    that JSON lacks. One entry per object of the session, and `rng` and `session`."""
    rank_states: dict[str, dict[str, Any]] = {}
    """Entries of `state` that differ on other ranks, by rank; `{"$absent": true}` for missing ones."""
    origin: Origin | None = None
    """The checkpoint that it is a copy of, in a forked job."""


ABSENT = {"$absent": True}


def digest(data: Any) -> str:
    """Return the xxh3-128 digest of a buffer, in hex. Releases the interpreter lock for large buffers."""
    return xxhash.xxh3_128_hexdigest(data)


def hasher() -> xxhash.xxh3_128:
    """Return an incremental digest."""
    return xxhash.xxh3_128()


def digest_tensor(data: memoryview) -> tuple[str, list[str] | None]:
    """Return (digest, chunks) of the bytes of a tensor, independent of its offset in the file."""
    starts = range(0, max(1, len(data)), CHUNK_BYTES)
    return tensor_digests([digest(data[at : at + CHUNK_BYTES]) for at in starts])


def tensor_digests(chunks: list[str]) -> tuple[str, list[str] | None]:
    """Return the digest of a tensor, and those of its chunks if it has several."""
    return (chunks[0], None) if len(chunks) == 1 else (digest_of_chunks(chunks), chunks)


def digest_of_chunks(chunks: Sequence[str]) -> str:
    return digest(b"".join(bytes.fromhex(chunk) for chunk in chunks))


class DigestRange(msgspec.Struct, frozen=True, gc=False):
    """A range of a file that one digest covers: the header, a tensor, or a chunk of a large tensor."""

    tensor: Tensor | None
    """None for the header, and for a block of an encoded file."""
    start: int
    end: int
    digest: str

    def __str__(self) -> str:
        if self.tensor is None:
            return f"the encoded block of bytes {self.start:,} to {self.end:,}" if self.start else "the header"
        if self.tensor.chunks is None:
            return f"tensor {self.tensor.name}"
        return f"tensor {self.tensor.name}, bytes {self.start:,} to {self.end:,} of the file"


def digest_ranges(manifest: Manifest, file: File) -> Iterator[DigestRange]:
    """Yield the ranges that make up a file, in file order."""
    yield DigestRange(None, 0, file.header_bytes, file.header_digest)
    for tensor in sorted(tensors_of(manifest, file.name), key=lambda tensor: tensor.start):
        yield from tensor_ranges(tensor)


def tensor_ranges(tensor: Tensor) -> Iterator[DigestRange]:
    for number, found in enumerate(tensor.chunks or [tensor.digest]):
        start = tensor.start + number * CHUNK_BYTES
        yield DigestRange(tensor, start, min(start + CHUNK_BYTES, tensor.end), found)


class TensorRange(msgspec.Struct, frozen=True, gc=False):
    """The range of a tensor in the data section of a payload."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class Shard(msgspec.Struct, frozen=True, gc=False):
    """The position of a shard in the global tensor."""

    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    """One per dimension."""


LARGE_BYTES = 1 << 20
"""A tensor of at least this size may be written in part."""
SMALL_BYTES = 64 << 10
LINE_BYTES = 64
"""A cache line, to which the allocator of torch aligns tensors."""


def lay_out(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> list[TensorRange]:
    """Place (name, dtype, shape) back to back without gaps, as safetensors requires.

    Tensors that fill whole cache lines come first, so that each is aligned to one and can be used where it was
    read; then the others, widest elements first, each aligned to its element. Small tensors are adjacent, so that
    they are copied at once.
    """
    sized = [(name, dtype, shape, ITEM_BYTES[dtype] * math.prod(shape)) for name, dtype, shape in tensors]
    slots, at = [], 0
    for name, dtype, shape, size in sorted(sized, key=_layout_order):
        slots.append(TensorRange(name, dtype, shape, at, at + size))
        at += size
    return slots


def _layout_order(sized: tuple[str, str, tuple[int, ...], int]) -> tuple[float, bool, str]:
    name, dtype, _, size = sized
    return -ITEM_BYTES[dtype] if size % LINE_BYTES else -math.inf, size >= SMALL_BYTES, name


class _HeaderEntry(msgspec.Struct, frozen=True, gc=False):
    """The entry of a tensor in the header of safetensors."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def payload_header(slots: Sequence[TensorRange], metadata: dict[str, str]) -> bytes:
    """Return the length field and header of a safetensors file, padded to a block for direct I/O."""
    # entry by entry: thousands of dicts would trigger the garbage collector, which stops all threads
    encode = msgspec.json.encode
    entries = [b'"__metadata__":%b' % encode(metadata)]
    for slot in slots:
        place = _HeaderEntry(slot.dtype, slot.shape, (slot.start, slot.end))
        entries.append(b"%b:%b" % (encode(slot.name), encode(place)))
    text = b"{%b}" % b",".join(entries)
    text += b" " * (-(len(text) + 8) % BLOCK_BYTES)
    return len(text).to_bytes(8, "little") + text


def check_size(file: File, size_bytes: int) -> None:
    """Raise DamagedCheckpoint when the size of a file differs from the manifest."""
    if size_bytes != file.size_bytes:
        raise DamagedCheckpoint(file.name, f"is {size_bytes:,} bytes long, not {file.size_bytes:,}")


def check_digest(file: File, covered: DigestRange, found: str) -> None:
    """Raise DamagedCheckpoint, naming the range, when the digest of its bytes differs."""
    if found != covered.digest:
        raise DamagedCheckpoint(file.name, f"{covered} does not match its digest")


def reused_bytes(files: Iterable[File | FileSummary]) -> int:
    """Return the size of the files that earlier checkpoints wrote."""
    return sum(file.size_bytes for file in files if file.written_by is not None)


def written_bytes(files: Iterable[File | FileSummary]) -> int:
    """Return the size of the other files with their parity: what was sent to the store."""
    return sum(file.stored_bytes for file in files if file.written_by is None)


def raw_bytes(files: Sequence[File | FileSummary]) -> int:
    """Return the size of the plain files that are stored encoded or plain; 0 if all are plain."""
    is_encoded = any(file.raw_bytes != file.size_bytes for file in files)
    return sum(file.raw_bytes for file in files) if is_encoded else 0


@functools.cache
def zeros(dimensions: int) -> tuple[int, ...]:
    """Return one cached tuple per length: a new one per tensor would trigger the garbage collector more often."""
    return (0,) * dimensions


def tensors_of(manifest: Manifest, file: str) -> Iterator[Tensor]:
    return (tensor for tensor in manifest.tensors if tensor.file == file)
