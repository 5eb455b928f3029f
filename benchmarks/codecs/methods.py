"""The encodings that are compared, each with the same interface: a block in, a block out."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import torch

from holdfast.codecs import planes

from . import chunks, differences, merkle
from .training import Snapshot

BLOCK_BYTES = 16 << 20
CHUNK_BYTES = 128
LIMITED = 0.7
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True)
class Block:
    """At most 16 MiB of a tensor, and the same of the base."""

    name: str
    data: Bytes
    base: Bytes
    width: int
    base_digests: chunks.Digests
    whole_tensor_is_equal: bool

    @functools.cached_property
    def base_tree(self) -> merkle.BaseTree:
        """Kept from the base, like the digests of its chunks."""
        return merkle.BaseTree(self.base, CHUNK_BYTES)


@dataclass(slots=True)
class Encoded:
    """What a method stores of a block; `content` is None for the raw block."""

    content: Any
    stored_bytes: int
    metadata_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Method:
    name: str
    encode: Callable[[Block], Encoded]
    decode: Callable[[Encoded, Block], Any] | None = None


def blocks(state: Snapshot, base: Snapshot) -> list[Block]:
    found = []
    for name, tensor in state.items():
        data, earlier = _bytes(tensor), _bytes(base[name])
        equal = np.array_equal(data, earlier)
        for start in range(0, len(data), BLOCK_BYTES):
            part = slice(start, start + BLOCK_BYTES)
            width = tensor.element_size()
            found.append(
                Block(name, data[part], earlier[part], width, chunks.digests(earlier[part], CHUNK_BYTES), equal)
            )
    return found


def methods() -> list[Method]:
    return [
        Method("plain", lambda block: _raw(block.data.copy()), lambda encoded, _: encoded.content.copy()),
        Method(
            "whole tensors", _reuse, lambda encoded, block: encoded.content if encoded.content is not None else 0
        ),
        Method("zstd -3", _zstd, lambda encoded, block: planes.zstd.decompress(encoded.content)),
        Method("zipnn", _zipnn, _from_zipnn),
        Method("zipnn, XOR", _zipnn_delta, _from_zipnn_delta),
        Method("planes", _planes, _from_planes),
        Method("XOR + planes", _xor, _from_xor),
        Method("difference + planes", _difference, _from_difference),
        Method("chosen", _chosen, _from_difference),
        Method("Merkle tree", _merkle),
        Method("chunk digests", _chunks, _from_chunks),
    ]


def has_zipnn() -> bool:
    try:
        version("zipnn")
    except PackageNotFoundError:
        return False
    return True


def _bytes(tensor: torch.Tensor) -> Bytes:
    found: Bytes = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return found


def _raw(data: Bytes) -> Encoded:
    return Encoded(data, len(data))


def _kept_if(content: bytes | None, block: Block, metadata_bytes: int) -> Encoded:
    """Return an encoded block, or the raw one where encoding did not pay."""
    if content is None:
        return Encoded(None, len(block.data))
    return Encoded(content, len(content), metadata_bytes)


def _reuse(block: Block) -> Encoded:
    return Encoded(None, 0) if block.whole_tensor_is_equal else _raw(block.data)


def _zstd(block: Block) -> Encoded:
    content = planes.zstd.compress(block.data, 3)
    return Encoded(content, len(content))


def _planes(block: Block) -> Encoded:
    return _kept_if(planes.encode(block.data, block.width), block, _header_bytes(block))


def _difference(block: Block) -> Encoded:
    return _kept_if(differences.encode(block.data, block.width, block.base), block, _header_bytes(block))


def _chosen(block: Block) -> Encoded:
    """Whole tensors are reused, and a base is used only where a restore then reads at most 1.3 times the bytes."""
    if block.whole_tensor_is_equal:
        return Encoded(None, 0)
    content = differences.encode(block.data, block.width, block.base, LIMITED)
    return _kept_if(content, block, _header_bytes(block))


def _xor(block: Block) -> Encoded:
    content = planes.encode(np.bitwise_xor(block.data, block.base), block.width)
    return _kept_if(content, block, _header_bytes(block))


def _header_bytes(block: Block) -> int:
    return planes.header_bytes(block.width, len(block.data))


def _from_planes(encoded: Encoded, block: Block) -> Bytes:
    if encoded.content is None:
        return block.data.copy()
    out = np.empty_like(block.data)
    planes.decode(encoded.content, out)
    return out


def _from_difference(encoded: Encoded, block: Block) -> Bytes:
    if encoded.content is None:
        return block.data.copy()
    out = np.empty_like(block.data)
    differences.decode(encoded.content, out, block.base)
    return out


def _from_xor(encoded: Encoded, block: Block) -> Bytes:
    if encoded.content is None:
        return block.data.copy()
    out = np.empty_like(block.data)
    planes.decode(encoded.content, out)
    return np.bitwise_xor(out, block.base, out=out)


def _chunks(block: Block) -> Encoded:
    content = chunks.encode(block.data, block.base_digests, len(block.base), CHUNK_BYTES)
    return _kept_if(content, block, chunks.metadata_bytes(content) if content is not None else 0)


def _from_chunks(encoded: Encoded, block: Block) -> Bytes:
    if encoded.content is None:
        return block.data.copy()
    out = np.empty_like(block.data)
    chunks.decode(encoded.content, out, block.base)
    return out


def _merkle(block: Block) -> Encoded:
    new, metadata = merkle.stored_bytes(block.data, block.base_tree, CHUNK_BYTES)
    return Encoded(None, min(new + metadata, len(block.data)), metadata)


def _zip(block: Block, **options: Any) -> Any:
    from zipnn import ZipNN

    kind = {1: "uint8", 2: "bfloat16", 4: "float32"}.get(block.width, "float32")
    return ZipNN(input_format="byte", bytearray_dtype=kind, threads=1, **options)


def _zipnn(block: Block) -> Encoded:
    content = _zip(block).compress(bytearray(block.data))  # it overwrites its input
    return Encoded(content, len(content))


def _from_zipnn(encoded: Encoded, block: Block) -> Any:
    return _zip(block).decompress(encoded.content)


def _zipnn_delta(block: Block) -> Encoded:
    zipper = _zip(block, delta_compressed_type="byte")
    content = zipper.compress(bytearray(block.data), delta_second_data=bytearray(block.base))
    return Encoded(content, len(content))


def _from_zipnn_delta(encoded: Encoded, block: Block) -> Any:
    zipper = _zip(block, delta_compressed_type="byte")
    return zipper.decompress(encoded.content, delta_second_data=bytearray(block.base))
