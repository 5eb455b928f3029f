"""File transforms: how the blocks of a payload file are encoded, and decoded again, without a loss.

Other packages add transforms as entry points of the group `holdfast.transforms`:

    [project.entry-points."holdfast.transforms"]
    zip = "my_package:Zip"

Each names an object with the members of `FileTransform`. `compress="zip"` then has checkpoints encoded with it,
which can be read only where the package is installed. What a transform of another package encodes is decoded at
once and compared; if it differs, the file is written as it is.

Does not import torch, and numpy only for byte planes.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Protocol

import xxhash

from holdfast.errors import UnknownFormat
from holdfast.format.encoding import CODEC, MOST_BLOCK_BYTES, EncodedBlock, Encoding

GROUP = "holdfast.transforms"
_BUILT_IN = {CODEC: "holdfast.codecs.planes"}
_SUFFIX, _TAKEN = (
    re.compile(r"\.[a-z0-9]{1,20}"),
    {".safetensors", ".planes", ".parity", ".rows", ".base", ".json"},
)
OWN_BLOCK_BYTES = 1 << 20
"""A tensor of at least this size shares no block with others: what is gained is decided for each block."""
LEAST_OPENING = 100_000_000
"""Least number in the first 8 bytes of an encoded file, little-endian. It is beyond the limit of safetensors for
the length of a header, so that no reader of plain files takes the file for one."""


class FileTransform(Protocol):
    """Encodes blocks of payload files. A module or an object; its functions are called on several threads."""

    suffix: str
    """How the names of its files end: a dot and lower-case letters."""

    def encode(self, data: memoryview, width: int, /) -> bytes | None:
        """Encode a block of numbers of `width` bytes: 1, 2, 4 or 8; `None` to store it as it is.

        The result has fewer bytes than the block, and its first 8 bytes are at least `LEAST_OPENING` as a
        little-endian number.
        """

    def decode(self, encoded: memoryview, out: memoryview, /) -> None:
        """Decode what `encode` returned into `out`, which has the size of the block.

        Raises:
            ValueError: the bytes are damaged.
        """


def transform_names() -> set[str]:
    """Return the names of all transforms of this installation."""
    return {CODEC, *(entry.name for entry in entry_points(group=GROUP))}


def require_transform(name: str, file: str) -> None:
    """Raise UnknownFormat if no installed package has the transform that encoded a file."""
    if name not in transform_names():
        raise UnknownFormat(
            f"{file} has the unknown encoding {name!r}: upgrade holdfast, or install the package that adds it "
            f"(entry point group {GROUP}), to restore it"
        )


@functools.cache
def file_transform(name: str) -> FileTransform:
    """Return a transform by name.

    Raises:
        UnknownFormat: no installed package has it.
        ValueError: its files would have the suffix of others.
    """
    require_transform(name, "a file")
    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    entry = EntryPoint(name, _BUILT_IN[name], GROUP) if name in _BUILT_IN else found[name]
    transform: FileTransform = entry.load()
    if not _SUFFIX.fullmatch(transform.suffix) or (name not in _BUILT_IN and transform.suffix in _TAKEN):
        raise ValueError(f"the file transform {name} has the suffix {transform.suffix!r}, which no file can have")
    return transform


def cut_blocks(tensors: Iterable[tuple[int, int, int]]) -> Iterator[tuple[int, int, int]]:
    """Yield the (start, end, width of a number) of blocks, from those of tensors, in their order."""
    pending: tuple[int, int, int] | None = None
    for start, end, width in tensors:
        if start == end:
            continue
        is_small = end - start < OWN_BLOCK_BYTES
        if pending is not None:
            first, last, known = pending
            if is_small and (last, known) == (start, width) and end - first <= MOST_BLOCK_BYTES:
                pending = first, end, width
                continue
            yield pending
        pending = (start, end, width) if is_small else None
        if not is_small:
            yield from ((at, min(at + MOST_BLOCK_BYTES, end), width) for at in range(start, end, MOST_BLOCK_BYTES))
    if pending is not None:
        yield pending


def encode_parts(
    name: str, header: bytes, payload: memoryview, blocks: Iterable[tuple[int, int, int]]
) -> tuple[list[memoryview | bytes], Encoding | None]:
    """Encode a file that consists of `header` and `blocks` of the payload with the transform `name`.

    Takes memory of the size of the result. The first block is always encoded: its first bytes, as the length of a
    header, are beyond the limit of safetensors, which therefore refuses the file.

    Returns:
        The bytes to store, and their description; None where no block of the payload became smaller.

    Raises:
        ValueError: what a transform of another package encodes is not what it decodes.
        The errors of such a transform.
    """
    encode = functools.partial(_encoded, name, file_transform(name))
    parts = [encode(memoryview(piece), 1) or piece for piece in _pieces(header)]
    stored: list[memoryview | bytes] = [*parts]
    raw, is_smaller = [len(piece) for piece in _pieces(header)], False
    for start, end, width in blocks:
        data = payload[start:end]
        encoded = encode(data, width)
        is_smaller |= encoded is not None
        stored.append(data if encoded is None else encoded)
        raw.append(len(data))
    if not is_smaller or len(parts[0]) == raw[0] or int.from_bytes(parts[0][:8], "little") < LEAST_OPENING:
        return [], None
    found = [
        EncodedBlock(size, len(part), xxhash.xxh3_128_hexdigest(part))
        for size, part in zip(raw, stored, strict=True)
    ]
    return stored, Encoding(codec=name, raw_bytes=sum(raw), blocks=found)


def decode_block(name: str, block: EncodedBlock, stored: memoryview, out: memoryview) -> str | None:
    """Decode a block of the transform `name` into `out`, which has its raw size; return what is wrong, or None.

    Raises UnknownFormat if the transform cannot be loaded.
    """
    if xxhash.xxh3_128_hexdigest(stored) != block.digest:
        return "does not match its digest"
    if block.stored_bytes == block.raw_bytes:
        out[:] = stored
        return None
    try:
        transform = file_transform(name)
    except (ImportError, ValueError) as error:  # the file may be sound
        what = f"the file transform {name} cannot be loaded: {error}. Install what it needs"
        raise UnknownFormat(what) from error
    try:
        transform.decode(stored, out)
    except MemoryError:
        raise
    except Exception as error:  # of another package, which may raise anything
        return f"cannot be decoded: {error}"
    return None


def _encoded(name: str, transform: FileTransform, data: memoryview, width: int) -> bytes | None:
    """Encode a block; `None` where that saves nothing."""
    encoded = transform.encode(data, width)
    if encoded is None or len(encoded) >= len(data):
        return None
    if name not in _BUILT_IN:  # tests show that ours are exact
        out = memoryview(bytearray(len(data)))
        transform.decode(memoryview(encoded), out)
        if out != data:
            raise ValueError(f"the file transform {name} does not decode what it encodes")
    return encoded


def _pieces(data: bytes) -> Sequence[bytes]:
    return [data[at : at + MOST_BLOCK_BYTES] for at in range(0, len(data), MOST_BLOCK_BYTES)]
