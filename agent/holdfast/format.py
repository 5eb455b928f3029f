"""A checkpoint as bytes: safetensors payloads, a JSON manifest, digests. Knows neither torch nor where bytes go.

The payload is a plain safetensors file (8 bytes of header length, JSON header, tensors back to back), laid
out here rather than by the safetensors library because the arena that snapshots fill already *is* its data
section: it goes to the file in a few large writes, with no copy and no work per tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import msgspec
import xxhash

from holdfast.errors import DamagedCheckpoint, UnknownFormat

FORMAT = 1
MANIFEST = "manifest.json"
DIGEST = "xxh3-128"

ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip


class Tensor(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor, or one rank's shard of it, and where its bytes are."""

    name: str
    dtype: str
    """As safetensors names it: F32, BF16, I64 …"""
    shape: tuple[int, ...]
    """Of this shard."""
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    """Of this shard within the global tensor, one a dimension."""
    file: str
    start: int
    """First byte within the file."""
    end: int
    """One past the last byte within the file."""
    digest: str
    view: str | None = None
    """The torch dtype to view the stored elements as, where safetensors has none of its own: complex128."""


class File(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    size_bytes: int
    header_bytes: int
    """Length field and JSON header, ahead of the tensors."""
    header_digest: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """All that is known of a checkpoint; written last, so that a checkpoint with a manifest is whole."""

    format: Literal[1] = 1
    job: str
    iteration: int
    """The state is that right after this iteration's optimizer step."""
    lineage: int
    attempt: int
    kind: str
    """scheduled, requested, safety or final."""
    created_at: float
    """Seconds since the epoch, for display only."""
    parent: str | None
    """The checkpoint before it on its lineage, or the one its lineage began from."""
    world_size: int
    digest: str = DIGEST
    files: list[File]
    tensors: list[Tensor]
    state: dict[str, Any]
    """The tree of names: JSON with `{"$tensor": name}` where a tensor belongs, and other `$` tags for what
    JSON has no word for. One entry an object of the session, `rng` and `session` among them."""
    timings: dict[str, float] = {}
    versions: dict[str, str] = {}


def digest(data: Any) -> str:
    """xxh3-128 of a buffer, in hex. Large buffers are hashed without the interpreter lock."""
    return xxhash.xxh3_128_hexdigest(data)


class Slot(msgspec.Struct, frozen=True):
    """Where a tensor lies in a payload's data section."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def lay_out(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> list[Slot]:
    """Place (name, dtype, shape) back to back, widest elements first: every tensor is aligned to its element."""
    slots, at = [], 0
    for name, dtype, shape in sorted(tensors, key=lambda t: (-ITEM_BYTES[t[1]], t[0])):
        size = ITEM_BYTES[dtype]
        for length in shape:
            size *= length
        slots.append(Slot(name, dtype, shape, at, at + size))
        at += size
    return slots


def payload_header(slots: Sequence[Slot], metadata: dict[str, str]) -> bytes:
    """The opening of a safetensors file, padded so that the data section is aligned to 64 bytes."""
    header: dict[str, Any] = {"__metadata__": metadata}
    for slot in slots:
        header[slot.name] = {
            "dtype": slot.dtype,
            "shape": list(slot.shape),
            "data_offsets": [slot.start, slot.end],
        }
    text = msgspec.json.encode(header)
    text += b" " * (-(len(text) + 8) % 64)
    return len(text).to_bytes(8, "little") + text


def encode_manifest(manifest: Manifest) -> bytes:
    return msgspec.json.format(msgspec.json.encode(manifest), indent=1)


def decode_manifest(data: bytes, file: str = MANIFEST) -> Manifest:
    """Parse a manifest.

    Raises:
        UnknownFormat: written by a newer Holdfast.
        DamagedCheckpoint: not a manifest.
    """
    try:
        found = msgspec.json.decode(data)
        number = found["format"]
    except (msgspec.DecodeError, TypeError, KeyError) as error:
        raise DamagedCheckpoint(file, f"is not a manifest ({error})") from error
    if number != FORMAT:
        raise UnknownFormat(
            f"{file}: checkpoint format {number!r}; this Holdfast reads format {FORMAT}: "
            "upgrade holdfast to restore it"
        )
    try:
        return msgspec.convert(found, Manifest)
    except msgspec.ValidationError as error:
        raise DamagedCheckpoint(file, f"is not a manifest of format {FORMAT}: {error}") from error


def check_file(manifest: Manifest, file: File, data: memoryview) -> None:
    """Compare a whole file with its digests; DamagedCheckpoint names what differs."""
    if len(data) != file.size_bytes:
        raise DamagedCheckpoint(file.name, f"is {len(data):,} bytes long, not {file.size_bytes:,}")
    if digest(data[: file.header_bytes]) != file.header_digest:
        raise DamagedCheckpoint(file.name, "its header does not match its digest")
    for tensor in tensors_of(manifest, file.name):
        if digest(data[tensor.start : tensor.end]) != tensor.digest:
            raise DamagedCheckpoint(file.name, f"tensor {tensor.name} does not match its digest")


def tensors_of(manifest: Manifest, file: str) -> Iterator[Tensor]:
    return (tensor for tensor in manifest.tensors if tensor.file == file)
