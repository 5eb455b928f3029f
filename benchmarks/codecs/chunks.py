"""Incremental blocks: chunks of an earlier state are referred to, and only new chunks are stored.

Chunks of 128 bytes are found again by 128-bit digests, at the same place, at another place of the base, or within
the block itself. Only the digests of the base are needed to encode, and its bytes to decode. Neighboring chunks
that are found in the same way form a region, and the list of regions is compressed. `merkle.py` has a tree over
the same digests. An encoded block is not checked for damage.

It begins with a header in little-endian order: 4 bytes of magic, the bytes of a chunk (4), of the block (8) and of
the base (8), the numbers of regions (4) and of those that are copies (4), and the stored length of their list (4).
The list follows, then the new chunks. It is a Zstandard frame of four arrays, of which the numbers are split into
byte planes: the kinds of the regions, their lengths in chunks, ordered by kind, and the sources and the steps
between the sources of consecutive chunks, 0 or 1, of those that are copies. A source is a chunk of the base, or a
stored chunk of the block.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from holdfast.codecs.planes import LEAST_GAIN, Buffer, decompress, zstd

CHUNK_BYTES = 128

_MAGIC = b"HFch"
_HEADER = struct.Struct("<4sIQQIII")
_KEPT, _NEW, _FROM_BASE, _FROM_BLOCK = range(4)
"""Kinds of chunks: as in the base, stored, a copy of another chunk of the base, or of a stored chunk."""
_LEAST_SAMPLES = 128
_SEGMENT_CHUNKS = 1 << 13  # what one pass works on stays in the cache of a core
_FACTORS = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F], np.uint64)
_SEEDS = np.array([0x165667B19E3779F9, 0x27D4EB2F165667C5], np.uint64)
_HALF = np.uint64(32)
_OPTIONS = {int(zstd.CompressionParameter.compression_level): 3, int(zstd.CompressionParameter.window_log): 17}

Digests = np.ndarray[Any, np.dtype[np.uint64]]
"""Digests of consecutive chunks, a row of two words for each."""
Places = np.ndarray[Any, np.dtype[np.int64]]


def digests(data: Buffer) -> Digests:
    """Return the digest of each chunk. The last one may be shorter than the others.

    They find equal chunks in states of training. They are no protection against chunks that are made to collide.
    """
    raw = np.frombuffer(data, np.uint8)
    if rest := len(raw) % CHUNK_BYTES:
        raw = np.append(raw, np.zeros(CHUNK_BYTES - rest, np.uint8))
    words = (raw if raw.ctypes.data % 8 == 0 else raw.copy()).view("<u8").reshape(-1, CHUNK_BYTES // 8)
    found = np.empty((len(words), 2), np.uint64)
    for start in range(0, len(words), _SEGMENT_CHUNKS):
        part = slice(start, start + _SEGMENT_CHUNKS)
        # columns one after the other: strided reads are slower than one copy
        found[part] = mixed(np.ascontiguousarray(words[part].T).T, CHUNK_BYTES)
    if rest:
        found[-1:] = mixed(found[-1:], rest)
    return found


def mixed(words: Any, length: int) -> Digests:
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
            np.multiply(state, _FACTORS[1 - lane], out=state)  # last: the next word cannot cancel a few bits
        np.right_shift(state, _HALF, out=shifted)
        np.bitwise_xor(state, shifted, out=state)
        found[:, lane] = state
    return found


def encode(data: Buffer, base: Digests, base_bytes: int, *, least_gain: float = LEAST_GAIN) -> bytes | None:
    """Return `data` as what differs from the base, or None if that would save less than `least_gain`.

    A sample of the chunks decides whether to digest all. It finds chunks that did not move.
    """
    raw = np.frombuffer(data, np.uint8)
    if _sampled_gain(raw, base) < least_gain / 2:
        return None
    kinds, sources = _find(digests(raw), base)
    added, inside = np.flatnonzero(kinds == _NEW), kinds == _FROM_BLOCK
    sources[inside] = np.searchsorted(added, sources[inside])
    starts, steps = _regions(kinds, sources)
    lengths = np.diff(np.append(starts, len(kinds)))
    listed = _listed(kinds[starts], lengths, sources[starts], steps)
    copies = int((kinds[starts] >= _FROM_BASE).sum())
    header = _HEADER.pack(_MAGIC, CHUNK_BYTES, len(raw), base_bytes, len(starts), copies, len(listed))
    whole = len(raw) // CHUNK_BYTES
    rest = raw[whole * CHUNK_BYTES :] if len(added) and added[-1] >= whole else raw[:0]
    encoded = b"".join([header, listed, _rows(raw)[added[added < whole]], rest])
    return None if len(encoded) > (1 - least_gain) * len(raw) else encoded


def metadata_bytes(encoded: Buffer) -> int:
    """Return the bytes of an encoded block that are not stored chunks."""
    return _HEADER.size + int(_HEADER.unpack_from(encoded)[-1])


def decode(encoded: Buffer, out: Buffer, base: Buffer) -> None:
    """Decode into `out`, whose length is that of the block."""
    view = memoryview(encoded).cast("B")
    raw, earlier = np.frombuffer(out, np.uint8), np.frombuffer(base, np.uint8)
    *_, count, copies, listed = _HEADER.unpack_from(view)
    kinds, sources = _expanded(view[_HEADER.size : _HEADER.size + listed], count, copies)
    new = np.frombuffer(view[_HEADER.size + listed :], np.uint8)
    sources[kinds == _NEW] = np.arange((kinds == _NEW).sum())
    whole, common = len(raw) // CHUNK_BYTES, min(len(raw), len(earlier))
    raw[:common] = earlier[:common]
    for kind, origin in ((_FROM_BASE, earlier), (_FROM_BLOCK, new), (_NEW, new)):
        places = np.flatnonzero(kinds == kind)
        full = places[places < whole]
        _rows(raw)[full] = _rows(origin)[sources[full]]
        if len(places) > len(full):
            start = int(sources[-1]) * CHUNK_BYTES
            raw[whole * CHUNK_BYTES :] = origin[start : start + len(raw) % CHUNK_BYTES]


def _sampled_gain(raw: Any, base: Digests) -> float:
    """Return the share of chunks of a sample that are as in the base."""
    rows = _rows(raw)[: len(base)]
    places = np.linspace(0, len(rows) - 1, min(len(rows), max(_LEAST_SAMPLES, len(rows) // 100))).astype(np.intp)
    return float((digests(rows[places]) == base[places]).all(axis=1).mean()) if len(places) else 0.0


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
        kinds[open_[equal]], sources[open_[equal]] = _FROM_BASE, candidates[equal]
        open_ = open_[~equal]
    if len(open_):
        _, first, which = np.unique(own[open_, 0], return_index=True, return_inverse=True)
        candidates = open_[first[which]]
        equal = (own[candidates] == own[open_]).all(axis=1) & (candidates != open_)
        kinds[open_[equal]], sources[open_[equal]] = _FROM_BLOCK, candidates[equal]
    return kinds, sources


def _regions(kinds: Any, sources: Places) -> tuple[Places, Any]:
    """Return the first chunk of each region, and the step between the sources of its chunks."""
    if not len(kinds):
        return np.empty(0, np.int64), np.empty(0, np.uint8)
    steps = np.diff(sources, prepend=sources[0] - 2)
    copied = kinds >= _FROM_BASE
    begins = np.append(True, kinds[1:] != kinds[:-1]) | (copied & (steps != 0) & (steps != 1))
    begins |= copied & np.append(False, (steps[1:] != steps[:-1]) & ~begins[:-1])
    starts = np.flatnonzero(begins)
    following = np.minimum(starts + 1, len(kinds) - 1)
    repeats = copied[starts] & ~begins[following] & (steps[following] == 0) & (following > starts)
    return starts, (~repeats).astype(np.uint8)


def _listed(kinds: Any, lengths: Any, sources: Places, steps: Any) -> bytes:
    copied = kinds >= _FROM_BASE
    ordered = lengths[np.argsort(kinds, kind="stable")]
    arrays = [kinds, _planes(ordered), _planes(sources[copied]), steps[copied]]
    return bytes(zstd.compress(b"".join(array.tobytes() for array in arrays), options=_OPTIONS))


def _planes(numbers: Any) -> Any:
    return np.ascontiguousarray(numbers.astype("<u4").view(np.uint8).reshape(-1, 4).T)


def _expanded(stored: memoryview, count: int, copies: int) -> tuple[Any, Places]:
    """Return the kind and the source of each chunk."""
    data = np.frombuffer(decompress(stored, 5 * count + 5 * copies), np.uint8)
    kinds, rest = data[:count], data[count:]
    lengths, sources, steps = (np.zeros(count, np.int64) for _ in range(3))
    lengths[np.argsort(kinds, kind="stable")] = rest[: 4 * count].reshape(4, -1).T.copy().view("<u4").ravel()
    copied, rest = kinds >= _FROM_BASE, rest[4 * count :]
    sources[copied] = rest[: 4 * copies].reshape(4, -1).T.copy().view("<u4").ravel()
    steps[copied] = rest[4 * copies :]
    ends = np.cumsum(lengths)
    within = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - lengths, lengths)
    return np.repeat(kinds, lengths), np.repeat(sources, lengths) + within * np.repeat(steps, lengths)


def _rows(raw: Any) -> Any:
    return raw[: len(raw) // CHUNK_BYTES * CHUNK_BYTES].reshape(-1, CHUNK_BYTES)
