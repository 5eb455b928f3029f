"""A checkpoint as bytes: safetensors payloads, a JSON manifest, digests. Knows neither torch nor where bytes go.

The payload is a plain safetensors file (8 bytes of header length, JSON header, tensors back to back), laid
out here rather than by the safetensors library because the arena that snapshots fill already *is* its data
section: it goes to the file in a few large writes, with no copy and no work per tensor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import msgspec
import xxhash

from holdfast.errors import DamagedCheckpoint, UnknownFormat
from holdfast.protocol.messages import MAX_ITERATION, MAX_LINEAGE, Origin, is_checkpoint_id

FORMAT = 1
MANIFEST = "manifest.json"
DIGEST = "xxh3-128"
CHUNK_BYTES = 16 << 20
"""The most that one digest covers: so much is read at a time, and so closely is damage located."""
BLOCK_BYTES = 4096
"""What direct I/O wants addresses, offsets and lengths to be multiples of."""

ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
PAIRS = {"complex128": "F64", "complex32": "F16"}
"""What views are stored as whose elements are pairs; any other view is of single bytes."""
MOST_BYTES = 2**53
"""In a file, or in a tensor."""
MOST_HEADER_BYTES = 1 << 30
MOST_DIMENSIONS = 64
"""torch copies no tensor of more."""


class Tensor(msgspec.Struct, frozen=True, kw_only=True, gc=False):
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
    """Of the tensor's bytes; of one larger than a chunk, that of its chunks' digests, one after the other."""
    chunks: list[str] | None = None
    """The digest of every 16 MiB of a tensor that is larger than that."""
    view: str | None = None
    """The torch dtype to view the stored elements as, where safetensors has none of its own: complex128."""
    rank: int | None = None
    """Of this rank alone; None for what all ranks share."""


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
    rank_states: dict[str, dict[str, Any]] = {}
    """Entries of `state` that are otherwise on other ranks, by rank; `{"$absent": true}` for those not there."""
    timings: dict[str, float] = {}
    versions: dict[str, str] = {}
    fingerprint: dict[str, str] = {}
    """What the bits of a result depend on besides the state: devices, threads, flags … Compared at a resume."""
    origin: Origin | None = None
    """What it is a copy of, in a job that was forked from another; left out of the file where it is of its own."""
    manifest_digest: str | msgspec.UnsetType = msgspec.UNSET
    """Of the file's bytes up to the comma before this, its last entry; there in files only."""


SEAL = b',\n "manifest_digest": "%b"\n}\n'
"""The end of a manifest. Without it a flipped bit in a learning rate would be restored as it is."""
_SEAL_FOUND = re.compile(SEAL % b"([0-9a-f]{32})")
_SEAL_BYTES = len(SEAL % bytes(32))
_SEALED = Manifest.__struct_fields__[:-1]


_PLAIN_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,254}")
_VIEW = re.compile(r"[a-z][a-z0-9_]{0,99}")
_RANK = re.compile(r"[0-9]{1,9}")
_DIGEST = re.compile(r"[0-9a-f]{32}")
ABSENT = {"$absent": True}


class _Numbered(msgspec.Struct):
    format: int


def digest(data: Any) -> str:
    """xxh3-128 of a buffer, in hex. Large buffers are hashed without the interpreter lock."""
    return xxhash.xxh3_128_hexdigest(data)


def hasher() -> xxhash.xxh3_128:
    """A digest of bytes that come one after the other."""
    return xxhash.xxh3_128()


def digest_tensor(data: memoryview) -> tuple[str, list[str] | None]:
    """(digest, chunks) of a tensor's bytes. They do not depend on where the tensor lies in its file."""
    if len(data) <= CHUNK_BYTES:
        return digest(data), None
    chunks = [digest(data[at : at + CHUNK_BYTES]) for at in range(0, len(data), CHUNK_BYTES)]
    return digest_of_chunks(chunks), chunks


def digest_of_chunks(chunks: Sequence[str]) -> str:
    return digest(b"".join(bytes.fromhex(chunk) for chunk in chunks))


class Piece(msgspec.Struct, frozen=True, gc=False):
    """A stretch of a file that one digest covers."""

    what: str
    """For people: the header, or a tensor and, of a large one, the bytes."""
    start: int
    end: int
    digest: str


def pieces(manifest: Manifest, file: File) -> Iterator[Piece]:
    """The whole of a file, in its order, as stretches that can be verified one by one."""
    yield Piece("the header", 0, file.header_bytes, file.header_digest)
    for tensor in sorted(tensors_of(manifest, file.name), key=lambda tensor: tensor.start):
        yield from pieces_of(tensor)


def pieces_of(tensor: Tensor) -> Iterator[Piece]:
    if tensor.chunks is None:
        yield Piece(f"tensor {tensor.name}", tensor.start, tensor.end, tensor.digest)
        return
    for number, found in enumerate(tensor.chunks):
        start = tensor.start + number * CHUNK_BYTES
        end = min(start + CHUNK_BYTES, tensor.end)
        yield Piece(f"tensor {tensor.name}, bytes {start:,} to {end:,} of the file", start, end, found)


class TensorRange(msgspec.Struct, frozen=True, gc=False):
    """Where a tensor lies in a payload's data section."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class Shard(msgspec.Struct, frozen=True, gc=False):
    """Where a part of a tensor lies in the whole."""

    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    """One a dimension."""


SMALL_BYTES = 64 << 10
LINE_BYTES = 64
"""A cache line: what torch's own allocator aligns tensors to."""


def lay_out(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> list[TensorRange]:
    """Place (name, dtype, shape) back to back, with no gaps, as safetensors wants it.

    First those that fill whole lines of a cache, so that each begins with one and can be trained on where it
    was read; then the others, widest elements first, each aligned to its element. Small tensors lie together,
    so that they are copied in one go.
    """
    sized = [(name, dtype, shape, ITEM_BYTES[dtype] * math.prod(shape)) for name, dtype, shape in tensors]
    slots, at = [], 0
    for name, dtype, shape, size in sorted(sized, key=_place):
        slots.append(TensorRange(name, dtype, shape, at, at + size))
        at += size
    return slots


def _place(sized: tuple[str, str, tuple[int, ...], int]) -> tuple[float, bool, str]:
    name, dtype, _, size = sized
    return -ITEM_BYTES[dtype] if size % LINE_BYTES else -math.inf, size >= SMALL_BYTES, name


class _Place(msgspec.Struct, frozen=True, gc=False):
    """As safetensors' header says it."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def payload_header(slots: Sequence[TensorRange], metadata: dict[str, str]) -> bytes:
    """The opening of a safetensors file, padded so that the data section begins a block for direct I/O."""
    # entry by entry: thousands of dicts at a time would set off the collector, for which all threads stop
    encode = msgspec.json.encode
    entries = [b'"__metadata__":%b' % encode(metadata)]
    for slot in slots:
        place = _Place(slot.dtype, slot.shape, (slot.start, slot.end))
        entries.append(b"%b:%b" % (encode(slot.name), encode(place)))
    text = b"{%b}" % b",".join(entries)
    text += b" " * (-(len(text) + 8) % BLOCK_BYTES)
    return len(text).to_bytes(8, "little") + text


def encode_manifest(manifest: Manifest) -> bytes:
    """The manifest as JSON, a line for each tensor, and last the digest of all that."""
    body = b"{\n " + b",\n ".join(
        b'"%b": %b' % (name.encode(), _lines(getattr(manifest, name)))
        for name in _SEALED
        if name != "origin" or manifest.origin is not None
    )
    return body + SEAL % digest(body).encode()


def manifest_digest(data: bytes) -> str:
    """The digest at the end of a manifest that was decoded: it stands for all that its checkpoint holds."""
    end = _SEAL_FOUND.fullmatch(data[-_SEAL_BYTES:])
    assert end is not None
    return end[1].decode()


def decode_manifest(data: bytes, file: str = MANIFEST) -> Manifest:
    """Parse a manifest.

    Raises:
        UnknownFormat: written by a newer Holdfast.
        DamagedCheckpoint: not a manifest, or not as it was written.
    """
    body, end = data[:-_SEAL_BYTES], _SEAL_FOUND.fullmatch(data[-_SEAL_BYTES:])
    if end is not None and digest(body).encode() != end[1]:
        raise DamagedCheckpoint(file, "does not match its digest")
    try:
        number = msgspec.json.decode(data, type=_Numbered).format
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedCheckpoint(file, f"is not a manifest ({error})") from error
    if number != FORMAT:
        raise UnknownFormat(
            f"{file}: checkpoint format {number!r}; this Holdfast reads format {FORMAT}: "
            "upgrade holdfast to restore it"
        )
    if end is None:
        raise DamagedCheckpoint(file, "is not a manifest that ends with its digest")
    try:
        return msgspec.json.decode(body + b"}", type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedCheckpoint(file, f"is not a manifest of format {FORMAT}: {error}") from error


def require_sound(manifest: Manifest) -> None:
    """DamagedCheckpoint when what a manifest says of itself, its files or its tensors cannot be.

    A digest shows what happened to bytes, not who wrote them: what is computed from a manifest is checked here.
    """
    if reason := _fault(manifest):
        raise DamagedCheckpoint(MANIFEST, reason)


def _fault(manifest: Manifest) -> str | None:
    if not (0 <= manifest.iteration <= MAX_ITERATION and 0 <= manifest.lineage <= MAX_LINEAGE):
        return f"there is no iteration {manifest.iteration} of lineage {manifest.lineage}"
    if manifest.attempt < 0 or manifest.world_size < 1:
        return f"there is no attempt {manifest.attempt} of {manifest.world_size} ranks"
    if manifest.digest != DIGEST:
        return f"its digests are {manifest.digest!r}, not {DIGEST}"
    if manifest.parent is not None and not is_checkpoint_id(manifest.parent):
        return f"its parent {manifest.parent!r} is no checkpoint"
    for rank in manifest.rank_states:
        if not (_RANK.fullmatch(rank) and int(rank) < manifest.world_size):
            return f"it has a state of rank {rank!r}, of {manifest.world_size} ranks"
    files: dict[str, File] = {}
    for file in manifest.files:
        if not _PLAIN_NAME.fullmatch(file.name) or file.name == MANIFEST:
            return f"{file.name!r} is no name of a file of tensors"
        if files.setdefault(file.name, file) is not file:
            return f"{file.name} is named twice"
        if not 0 <= file.header_bytes <= file.size_bytes <= MOST_BYTES:
            return f"{file.name} cannot have {file.size_bytes} bytes, {file.header_bytes} of them a header"
        if file.header_bytes > MOST_HEADER_BYTES:
            return f"{file.name} cannot have a header of {file.header_bytes} bytes"
    faults = (_tensor_fault(tensor, files.get(tensor.file), manifest.world_size) for tensor in manifest.tensors)
    return next(filter(None, faults), None) or _gap(manifest, files)


def _gap(manifest: Manifest, files: dict[str, File]) -> str | None:
    """Bytes of a file that no digest covers, or two do, in words."""
    at = {file.name: file.header_bytes for file in manifest.files}
    for tensor in sorted(manifest.tensors, key=lambda tensor: (tensor.start, tensor.end)):
        if tensor.start != at[tensor.file]:
            return f"tensor {tensor.name} does not begin where the one before it ends in {tensor.file}"
        at[tensor.file] = tensor.end
    short = (file for file in manifest.files if at[file.name] != file.size_bytes)
    return next((f"it says nothing of {file.name} from byte {at[file.name]:,} on" for file in short), None)


def _tensor_fault(tensor: Tensor, file: File | None, world_size: int) -> str | None:
    name, shape, size_bytes = tensor.name, tensor.shape, tensor.end - tensor.start
    item_bytes = ITEM_BYTES.get(tensor.dtype)
    if file is None:
        return f"tensor {name} is in {tensor.file!r}, which is no file of the checkpoint"
    if item_bytes is None:
        return f"tensor {name} has the unknown dtype {tensor.dtype!r}"
    if not len(shape) == len(tensor.offsets) == len(tensor.global_shape) <= MOST_DIMENSIONS:
        return f"tensor {name} has shape {shape} at {tensor.offsets} of {tensor.global_shape}"
    for sides in (shape, tensor.global_shape) if shape != tensor.global_shape else (shape,):
        # an empty tensor has strides as well
        if any(side < 0 for side in sides) or item_bytes * math.prod(side or 1 for side in sides) > MOST_BYTES:
            return f"tensor {name} cannot have the shape {sides}"
    if not file.header_bytes <= tensor.start <= tensor.end <= file.size_bytes:
        return f"tensor {name} is not within {file.name}: bytes {tensor.start} to {tensor.end}"
    if math.prod(shape) * item_bytes != size_bytes:
        return f"tensor {name} has {size_bytes} bytes, which are no {tensor.dtype} of shape {shape}"
    if tensor.rank is not None and not 0 <= tensor.rank < world_size:
        return f"tensor {name} is of rank {tensor.rank}, of {world_size} ranks"
    if tensor.chunks is not None:
        count = -(-size_bytes // CHUNK_BYTES)
        if len(tensor.chunks) != count or not all(map(_DIGEST.fullmatch, tensor.chunks)):
            return f"tensor {name} has other digests than one for each of {count} chunks"
        if digest_of_chunks(tensor.chunks) != tensor.digest:
            return f"the chunks of tensor {name} do not match its digest"
    elif size_bytes > CHUNK_BYTES:
        return f"tensor {name} has one digest for {size_bytes:,} bytes"
    if tensor.view is None:
        return None
    if (stored := PAIRS.get(tensor.view)) is not None:
        is_sound = tensor.dtype == stored and shape[-1:] == tensor.global_shape[-1:] == (2,)
    else:
        is_sound = tensor.dtype == "U8" and _VIEW.fullmatch(tensor.view) is not None
    return None if is_sound else f"tensor {name} is no {tensor.view!r}: it has {tensor.dtype} of shape {shape}"


def _lines(value: Any) -> bytes:
    """JSON, with a line for each item of a list."""
    encode = msgspec.json.encode
    if not value or not isinstance(value, list):
        return encode(value)
    return b"[\n  %b\n ]" % b",\n  ".join(map(encode, value))


def check_size(file: File, size_bytes: int) -> None:
    """DamagedCheckpoint when a file is not as long as it was."""
    if size_bytes != file.size_bytes:
        raise DamagedCheckpoint(file.name, f"is {size_bytes:,} bytes long, not {file.size_bytes:,}")


def check_digest(file: File, piece: Piece, found: str) -> None:
    """Compare the digest of a stretch of a file; DamagedCheckpoint names what differs."""
    if found != piece.digest:
        raise DamagedCheckpoint(file.name, f"{piece.what} does not match its digest")


def tensors_of(manifest: Manifest, file: str) -> Iterator[Tensor]:
    return (tensor for tensor in manifest.tensors if tensor.file == file)


def saved_rank(manifest: Manifest, rank: int) -> int:
    """Whose own tensors and trees a rank takes: with more ranks than there were, several take the same."""
    return rank % manifest.world_size


def tensors_for(manifest: Manifest, rank: int) -> dict[str, list[Tensor]]:
    """What a rank sees under each name: its own tensor where it has one, else the shards of the shared one."""
    saved = saved_rank(manifest, rank)
    shared: dict[str, list[Tensor]] = {}
    own: dict[str, list[Tensor]] = {}
    for tensor in manifest.tensors:
        if tensor.rank is None:
            shared.setdefault(tensor.name, []).append(tensor)
        elif tensor.rank == saved:
            own.setdefault(tensor.name, []).append(tensor)
    return shared | own if own else shared


def state_for(manifest: Manifest, rank: int) -> dict[str, Any]:
    """The tree of names as a rank sees it."""
    own = manifest.rank_states.get(str(saved_rank(manifest, rank)))
    if not own:
        return manifest.state
    return {keyword: tree for keyword, tree in (manifest.state | own).items() if tree != ABSENT}
