"""The encodings that are compared, each with the same interface: a block in, a block out."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from holdfast.codecs import planes

from . import chunks, differences, merkle
from .training import Snapshot

BLOCK_BYTES = 16 << 20
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
        return merkle.BaseTree(self.base)


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
        equal, width = np.array_equal(data, earlier), tensor.element_size()
        for start in range(0, len(data), BLOCK_BYTES):
            part, old = (each[start : start + BLOCK_BYTES] for each in (data, earlier))
            found.append(Block(name, part, old, width, chunks.digests(old), equal))
    return found


def methods() -> list[Method]:
    return [
        Method("plain", lambda block: _raw(block.data.copy()), lambda encoded, _: encoded.content.copy()),
        Method("whole tensors", _reuse, lambda encoded, _: encoded.content if encoded.content is not None else 0),
        Method(
            "zstd -3",
            lambda block: _kept(planes.zstd.compress(block.data, 3), block, 0),
            lambda encoded, _: planes.zstd.decompress(encoded.content),
        ),
        *([_zipnn("zipnn"), _zipnn("zipnn, XOR", is_delta=True)] if has_zipnn() else []),
        Method("planes", lambda block: _kept(planes.encode(block.data, block.width), block), _into(_from_planes)),
        Method("XOR + planes", _xor, _into(_from_xor)),
        Method("difference + planes", _difference, _into(differences.decode)),
        Method("chosen", _chosen, _into(differences.decode)),
        Method("Merkle tree", _merkle),
        Method("chunk digests", _chunks, _into(chunks.decode)),
    ]


def has_zipnn() -> bool:
    return importlib.util.find_spec("zipnn") is not None


def _bytes(tensor: torch.Tensor) -> Bytes:
    found: Bytes = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return found


def _raw(data: Bytes) -> Encoded:
    return Encoded(data, len(data))


def _kept(content: bytes | None, block: Block, metadata_bytes: int | None = None) -> Encoded:
    """Return an encoded block, or the raw one where encoding did not pay."""
    if content is None:
        return Encoded(None, len(block.data))
    if metadata_bytes is None:
        metadata_bytes = planes.header_bytes(block.width, len(block.data))
    return Encoded(content, len(content), metadata_bytes)


def _into(decode: Callable[[bytes, Bytes, Bytes], object]) -> Callable[[Encoded, Block], Bytes]:
    """Decode into new memory, with the base."""

    def decoded(encoded: Encoded, block: Block) -> Bytes:
        if encoded.content is None:
            return block.data.copy()
        out = np.empty_like(block.data)
        decode(encoded.content, out, block.base)
        return out

    return decoded


def _reuse(block: Block) -> Encoded:
    return Encoded(None, 0) if block.whole_tensor_is_equal else _raw(block.data)


def _from_planes(content: bytes, out: Bytes, base: Bytes) -> None:
    planes.decode(content, out)


def _xor(block: Block) -> Encoded:
    return _kept(planes.encode(np.bitwise_xor(block.data, block.base), block.width), block)


def _from_xor(content: bytes, out: Bytes, base: Bytes) -> None:
    planes.decode(content, out)
    np.bitwise_xor(out, base, out=out)


def _difference(block: Block) -> Encoded:
    return _kept(differences.encode(block.data, block.width, block.base), block)


def _chosen(block: Block) -> Encoded:
    """Whole tensors are reused, and a base is used only where a restore then reads at most 1.3 times the bytes."""
    if block.whole_tensor_is_equal:
        return Encoded(None, 0)
    return _kept(differences.encode(block.data, block.width, block.base, LIMITED), block)


def _chunks(block: Block) -> Encoded:
    content = chunks.encode(block.data, block.base_digests, len(block.base))
    return _kept(content, block, chunks.metadata_bytes(content) if content is not None else 0)


def _merkle(block: Block) -> Encoded:
    new, metadata = merkle.stored_bytes(block.data, block.base_tree)
    return Encoded(None, min(new + metadata, len(block.data)), metadata)


def _zipnn(name: str, *, is_delta: bool = False) -> Method:
    from zipnn import ZipNN

    def zipper(block: Block) -> Any:
        kind = {1: "uint8", 2: "bfloat16", 4: "float32"}.get(block.width, "float32")
        delta = {"delta_compressed_type": "byte"} if is_delta else {}
        return ZipNN(input_format="byte", bytearray_dtype=kind, threads=1, **delta)

    def second(block: Block) -> dict[str, Any]:
        return {"delta_second_data": bytearray(block.base)} if is_delta else {}

    return Method(
        name,
        lambda block: _kept(
            zipper(block).compress(bytearray(block.data), **second(block)), block, 0
        ),  # overwritten
        lambda encoded, block: zipper(block).decompress(encoded.content, **second(block)),
    )
