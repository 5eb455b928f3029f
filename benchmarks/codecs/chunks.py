"""Incremental blocks: chunks of an earlier state are referred to, and only new chunks are stored.

Chunks of 128 to 4096 bytes are found again by 128-bit digests, at the same place, at another place of the base,
or within the block itself. Only the digests of the base are needed to encode, and its bytes to decode.
Neighboring chunks that are found in the same way form a region, and the list of regions is compressed.

The digests are a flat array. A Merkle tree over it, whose nodes are compared from the root down, was measured
and is not used: it has to hash the same leaves, and a region that is not a subtree takes several of its nodes.

An encoded block begins with a header in little-endian order: 4 bytes of magic, the bytes of a chunk (4), of the
block (8) and of the base (8), the numbers of regions (4) and of those that are copies (4), and the stored
length of their list (4). The list follows, then the new chunks. It is a Zstandard frame of four arrays, of
which the numbers are split into byte planes: the kinds of the regions, their lengths in chunks, ordered by
kind, and the sources and the steps between the sources of consecutive chunks, 0 or 1, of those that are copies.
A source is a chunk of the base, or a stored chunk of the block.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from holdfast.codecs.planes import LEAST_GAIN, Buffer, DamagedEncoding, decompress, zstd

SMALLEST_CHUNK_BYTES = 128
LARGEST_CHUNK_BYTES = 4096

_MAGIC = b"HFch"
_HEADER = struct.Struct("<4sIQQIII")
_KEPT, _NEW, _FROM_BASE, _FROM_BLOCK = range(4)
"""Kinds of chunks: as in the base, stored, a copy of another chunk of the base, or of a stored chunk."""
_LEAST_SAMPLES = 128
_SEGMENT_CHUNKS = 1 << 13  # what one pass works on stays in the cache of a core
_WORDS = SMALLEST_CHUNK_BYTES // 8
_FACTORS = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F], np.uint64)
_SEEDS = np.array([0x165667B19E3779F9, 0x27D4EB2F165667C5], np.uint64)
_HALF = np.uint64(32)

Digests = np.ndarray[Any, np.dtype[np.uint64]]
"""Digests of consecutive chunks, a row of two words for each."""
Places = np.ndarray[Any, np.dtype[np.int64]]


def digests(data: Buffer, chunk_bytes: int) -> Digests:
    """Return the digest of each chunk. The last one may be shorter than `chunk_bytes`.

    They find equal chunks in states of training. They are no protection against chunks that are made to collide.

    Raises:
        ValueError: `chunk_bytes` is not 128, 256, 512, 1024, 2048 or 4096.
    """
    _check(chunk_bytes)
    raw = np.frombuffer(data, np.uint8)
    whole = len(raw) // chunk_bytes
    found = np.empty((-(-len(raw) // chunk_bytes), 2), np.uint64)
    _digest(raw[: whole * chunk_bytes], chunk_bytes, chunk_bytes, found[:whole])
    if rest := len(raw) % chunk_bytes:
        padded = np.zeros(chunk_bytes, np.uint8)
        padded[:rest] = raw[-rest:]
        _digest(padded, chunk_bytes, rest, found[whole:])
    return found


def encode(
    data: Buffer,
    base: Digests,
    base_bytes: int,
    chunk_bytes: int,
    *,
    verify: Buffer | None = None,
    least_gain: float = LEAST_GAIN,
) -> bytes | None:
    """Return `data` as what differs from the base, or None if that would save less than `least_gain`.

    A sample of the chunks decides whether to digest all. It finds chunks that did not move.

    Args:
        data: the bytes of one block.
        base: the digests of the base, for chunks of `chunk_bytes`.
        base_bytes: length of the base.
        chunk_bytes: length of a chunk. Less finds more equal chunks and takes more time and memory for digests.
        verify: the bytes of the base, where they are at hand: equal digests of different chunks are then found.
            Without it, they make the digest of the decoded block differ.
        least_gain: share of the bytes that the encoding must save.
    """
    raw = np.frombuffer(data, np.uint8)
    if _sampled_gain(raw, base, chunk_bytes) < least_gain / 2:
        return None
    own = digests(raw, chunk_bytes)
    kinds, sources = _find(own, base)
    _verify(raw, None if verify is None else np.frombuffer(verify, np.uint8), chunk_bytes, kinds, sources)
    added = np.flatnonzero(kinds == _NEW)
    inside = kinds == _FROM_BLOCK
    sources[inside] = np.searchsorted(added, sources[inside])
    starts, steps = _regions(kinds, sources)
    listed = _listed(kinds[starts], np.diff(np.append(starts, len(kinds))), sources[starts], steps)
    new = _chunks(raw, added, chunk_bytes)
    copies = int((kinds[starts] >= _FROM_BASE).sum())
    header = _HEADER.pack(_MAGIC, chunk_bytes, len(raw), base_bytes, len(starts), copies, len(listed))
    encoded = b"".join([header, listed, *new])
    return None if len(encoded) > (1 - least_gain) * len(raw) else encoded


def metadata_bytes(encoded: Buffer) -> int:
    """Return the bytes of an encoded block that are not stored chunks."""
    return _HEADER.size + int(_HEADER.unpack_from(encoded)[-1])


def decode(encoded: Buffer, out: Buffer, base: Buffer) -> None:
    """Decode into `out`, whose length is that of the block. Its content is undefined after an error.

    The memory that this takes is limited by the length of `out`. The caller compares the digest of the result.

    Raises:
        DamagedEncoding: the bytes are not an encoding of a block of that length against a base of that length.
    """
    view = memoryview(encoded).cast("B")
    raw, earlier = np.frombuffer(out, np.uint8), np.frombuffer(base, np.uint8)
    if len(view) < _HEADER.size:
        raise DamagedEncoding("the header is cut off")
    magic, chunk_bytes, raw_bytes, base_bytes, count, copies, listed = _HEADER.unpack_from(view)
    if magic != _MAGIC or not _is_chunk_size(chunk_bytes):
        raise DamagedEncoding("the header is not that of an incremental block")
    if (raw_bytes, base_bytes) != (len(raw), len(earlier)):
        raise DamagedEncoding(f"{raw_bytes} bytes from a base of {base_bytes}, not {len(raw)} from {len(earlier)}")
    chunks = -(-raw_bytes // chunk_bytes)
    if count > chunks or copies > count or _HEADER.size + listed > len(view):
        raise DamagedEncoding("the lengths in the header do not match")
    regions = _unlisted(view[_HEADER.size : _HEADER.size + listed], count, copies, chunks)
    kinds, sources = _expanded(*regions)
    _restore(raw, earlier, np.frombuffer(view[_HEADER.size + listed :], np.uint8), chunk_bytes, kinds, sources)


def _is_chunk_size(chunk_bytes: int) -> bool:
    return SMALLEST_CHUNK_BYTES <= chunk_bytes <= LARGEST_CHUNK_BYTES and not chunk_bytes & (chunk_bytes - 1)


def _check(chunk_bytes: int) -> None:
    if not _is_chunk_size(chunk_bytes):
        raise ValueError(f"chunk_bytes is {chunk_bytes}; it must be 128, 256, 512, 1024, 2048 or 4096")


def _digest(raw: Any, chunk_bytes: int, length: int, out: Digests) -> None:
    """Digest whole chunks: pieces of 128 bytes first, then their digests, so that memory is read in order."""
    pieces = chunk_bytes // SMALLEST_CHUNK_BYTES
    step = _SEGMENT_CHUNKS // pieces
    for start in range(0, len(out), step):
        part = raw[start * chunk_bytes : (start + step) * chunk_bytes]
        if not len(part):
            return
        aligned = part if part.ctypes.data % 8 == 0 else part.copy()
        # columns one after the other: strided reads are slower than one copy
        columns = np.ascontiguousarray(aligned.view("<u8").reshape(-1, _WORDS).T)
        found = _mixed(columns.T, SMALLEST_CHUNK_BYTES)
        if pieces > 1:
            found = _mixed(found.reshape(-1, 2 * pieces), length)
        elif length != SMALLEST_CHUNK_BYTES:
            found = _mixed(found, length)
        out[start : start + step] = found


def _mixed(words: Any, length: int) -> Digests:
    """Return two words for each row. Each step is a bijection of the state: one changed word always shows."""
    found = np.empty((len(words), 2), np.uint64)
    state, shifted = np.empty(len(words), np.uint64), np.empty(len(words), np.uint64)
    for lane in range(2):
        state[:] = _SEEDS[lane] ^ np.uint64(length)
        for column in range(words.shape[1]):
            (np.bitwise_xor if lane else np.add)(state, words[:, column], out=state)
            np.multiply(state, _FACTORS[lane], out=state)
            np.right_shift(state, _HALF, out=shifted)
            np.bitwise_xor(state, shifted, out=state)
            np.multiply(
                state, _FACTORS[1 - lane], out=state
            )  # last, so that the next word cannot cancel a few bits
        np.right_shift(state, _HALF, out=shifted)
        np.bitwise_xor(state, shifted, out=state)
        found[:, lane] = state
    return found


def _sampled_gain(raw: Any, base: Digests, chunk_bytes: int) -> float:
    """Return the share of chunks of a sample that are as in the base."""
    rows = _rows(raw, chunk_bytes)[: len(base)]
    places = np.linspace(0, len(rows) - 1, min(len(rows), max(_LEAST_SAMPLES, len(rows) // 100))).astype(np.intp)
    if not len(places):
        return 0.0
    sampled = digests(rows[places], chunk_bytes)
    return float((sampled == base[places]).all(axis=1).mean())


def _find(own: Digests, base: Digests) -> tuple[Any, Places]:
    """Return the kind of each chunk and its source, by digests alone."""
    kinds, sources = np.full(len(own), _NEW, np.uint8), np.arange(len(own))
    common = min(len(own), len(base))
    kinds[:common][(own[:common] == base[:common]).all(axis=1)] = _KEPT
    open_ = np.flatnonzero(kinds == _NEW)
    if len(open_) and len(base):
        order = np.argsort(base[:, 0], kind="stable")
        places = np.searchsorted(base[order, 0], own[open_, 0])
        candidates = order[np.minimum(places, len(base) - 1)]
        equal = (base[candidates] == own[open_]).all(axis=1)
        kinds[open_[equal]] = _FROM_BASE
        sources[open_[equal]] = candidates[equal]
        open_ = open_[~equal]
    if len(open_):
        _, first, which = np.unique(own[open_, 0], return_index=True, return_inverse=True)
        candidates = open_[first[which]]
        equal = (own[candidates] == own[open_]).all(axis=1) & (candidates != open_)
        kinds[open_[equal]] = _FROM_BLOCK
        sources[open_[equal]] = candidates[equal]
    return kinds, sources


def _verify(raw: Any, base: Any, chunk_bytes: int, kinds: Any, sources: Places) -> None:
    """Make chunks new whose bytes differ from those of their source."""
    for kind, origin in ((_KEPT, base), (_FROM_BASE, base), (_FROM_BLOCK, raw)):
        places = np.flatnonzero(kinds == kind)
        if origin is None or not len(places):
            continue
        copies = _chunks(raw, places, chunk_bytes), _chunks(origin, sources[places], chunk_bytes)
        equal = np.zeros(len(places), bool)
        if copies[0][0].shape == copies[1][0].shape:
            equal[: len(copies[0][0])] = (copies[0][0] == copies[1][0]).all(axis=1)
        if len(equal) > len(copies[0][0]):
            equal[-1] = np.array_equal(copies[0][1], copies[1][1])
        kinds[places[~equal]] = _NEW
        sources[places[~equal]] = places[~equal]


def _chunks(raw: Any, places: Places, chunk_bytes: int) -> tuple[Any, Any]:
    """Return the whole chunks at some places as rows, and the last, shorter one if it is among them."""
    whole = len(raw) // chunk_bytes
    rows = _rows(raw, chunk_bytes)[places[places < whole]]
    return rows, raw[whole * chunk_bytes :] if len(places) and places[-1] >= whole else raw[:0]


def _regions(kinds: Any, sources: Places) -> tuple[Places, Any]:
    """Return the first chunk of each region, and the step between the sources of its chunks."""
    if not len(kinds):
        return np.empty(0, np.int64), np.empty(0, np.uint8)
    steps = np.diff(sources, prepend=sources[0] - 2)
    copied = kinds >= _FROM_BASE
    begins = np.append(True, kinds[1:] != kinds[:-1]) | (copied & (steps != 0) & (steps != 1))
    changes = np.append(False, (steps[1:] != steps[:-1]) & ~begins[:-1])
    begins |= copied & changes
    starts = np.flatnonzero(begins)
    following = np.minimum(starts + 1, len(kinds) - 1)
    repeats = copied[starts] & ~begins[following] & (steps[following] == 0) & (following > starts)
    return starts, (~repeats).astype(np.uint8)


def _listed(kinds: Any, lengths: Any, sources: Places, steps: Any) -> bytes:
    copied = kinds >= _FROM_BASE
    ordered = lengths[np.argsort(kinds, kind="stable")]
    arrays = [kinds, _planes(ordered), _planes(sources[copied]), steps[copied]]
    return compressed(b"".join(array.tobytes() for array in arrays))


def _planes(numbers: Any) -> Any:
    return np.ascontiguousarray(numbers.astype("<u4").view(np.uint8).reshape(-1, 4).T)


def _unlisted(stored: memoryview, count: int, copies: int, chunks: int) -> tuple[Any, Places, Places, Places]:
    """Return kinds, lengths, sources and steps of the regions, which have `chunks` chunks together."""
    data = np.frombuffer(decompress(stored, 5 * count + 5 * copies), np.uint8)
    kinds = data[:count]
    copied = kinds >= _FROM_BASE
    if copied.sum() != copies:
        raise DamagedEncoding("the list of regions contradicts itself")
    lengths, sources, steps = (np.zeros(count, np.int64) for _ in range(3))
    numbers = data[count : 5 * count].reshape(4, -1).T.copy().view("<u4").ravel()
    lengths[np.argsort(kinds, kind="stable")] = numbers
    sources[copied] = data[5 * count : 5 * count + 4 * copies].reshape(4, -1).T.copy().view("<u4").ravel()
    steps[copied] = data[5 * count + 4 * copies :]
    if (kinds > _FROM_BLOCK).any() or (steps > 1).any() or (lengths == 0).any() or lengths.sum() != chunks:
        raise DamagedEncoding("the list of regions contradicts itself")
    return kinds, lengths, sources, steps


def _expanded(kinds: Any, lengths: Places, sources: Places, steps: Places) -> tuple[Any, Places]:
    """Return the kind and the source of each chunk."""
    ends = np.cumsum(lengths)
    within = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - lengths, lengths)
    return np.repeat(kinds, lengths), np.repeat(sources, lengths) + within * np.repeat(steps, lengths)


def _restore(raw: Any, base: Any, new: Any, chunk_bytes: int, kinds: Any, sources: Places) -> None:
    """Fill the block: the base first, then copies of its other chunks, the stored chunks and their copies."""
    whole = len(raw) // chunk_bytes
    kept, added = np.flatnonzero(kinds == _KEPT), np.flatnonzero(kinds == _NEW)
    if len(kept) and min(len(raw), (int(kept[-1]) + 1) * chunk_bytes) > len(base):
        raise DamagedEncoding("a region lies beyond the end of the base")
    if len(new) != len(added) * chunk_bytes - (len(added) > 0 and added[-1] >= whole) * (-len(raw) % chunk_bytes):
        raise DamagedEncoding("the number of new chunks does not match the list of regions")
    common = min(len(raw), len(base))
    raw[:common] = base[:common]
    for places, origin, found in (
        (np.flatnonzero(kinds == _FROM_BASE), base, sources[kinds == _FROM_BASE]),
        (np.flatnonzero(kinds == _FROM_BLOCK), new, sources[kinds == _FROM_BLOCK]),
        (added, new, np.arange(len(added))),
    ):
        ends = found * chunk_bytes + np.where(places < whole, chunk_bytes, len(raw) % chunk_bytes)
        if (ends > len(origin)).any():
            raise DamagedEncoding("a region lies beyond the end of its source")
        rows = raw[: whole * chunk_bytes].reshape(-1, chunk_bytes)
        rows[places[places < whole]] = _rows(origin, chunk_bytes)[found[places < whole]]
        if len(places) and places[-1] >= whole:
            start = int(found[-1]) * chunk_bytes
            raw[whole * chunk_bytes :] = origin[start : start + len(raw) % chunk_bytes]


def _rows(raw: Any, chunk_bytes: int) -> Any:
    return raw[: len(raw) // chunk_bytes * chunk_bytes].reshape(-1, chunk_bytes)


def compressed(data: Buffer) -> bytes:
    """Return a Zstandard frame that `frames.decompress` accepts."""
    options = {
        int(zstd.CompressionParameter.compression_level): 3,
        int(zstd.CompressionParameter.window_log): 17,
    }
    return bytes(zstd.compress(data, options=options))
