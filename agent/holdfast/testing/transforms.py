"""Tests that a file transform must pass."""

from __future__ import annotations

import contextlib
import random

import pytest
import safetensors.numpy
from safetensors import SafetensorError

from holdfast.format.encoding import MOST_BLOCK_BYTES
from holdfast.format.file_transforms import FileTransform, encode_parts
from holdfast.format.manifest import TensorRange, payload_header

COUNT = 50_000
"""Numbers in the blocks of most tests."""


class FileTransformContract:
    """All tests of a file transform. Subclass it, with a fixture `transform`."""

    @pytest.fixture
    def transform(self) -> FileTransform:
        """The object that the entry point names."""
        raise NotImplementedError("override the fixture `transform`")

    @pytest.mark.parametrize("width", [1, 2, 4, 8])
    @pytest.mark.parametrize("size", [1, 7, COUNT, COUNT + 3, MOST_BLOCK_BYTES])
    def test_what_is_decoded_is_what_was_encoded(self, transform: FileTransform, width: int, size: int) -> None:
        noise = random.Random(size).randbytes(size)  # noqa: S311
        for data in (bytes(size), noise, bytes(range(256)) * (size // 256 + 1)):
            block = memoryview(data)[:size]
            encoded = transform.encode(block, width)
            if encoded is not None:
                assert decoded(transform, encoded, size) == block

    def test_repetitions_become_smaller(self, transform: FileTransform) -> None:
        encoded = transform.encode(memoryview(bytes(4 * COUNT)), 4)
        assert encoded is not None
        assert len(encoded) < 2 * COUNT

    def test_a_reader_of_plain_files_refuses_an_encoded_one(
        self, transform: FileTransform, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("holdfast.format.file_transforms.file_transform", lambda name: transform)
        size = 4 * COUNT
        header = payload_header([TensorRange(name="weight", dtype="F32", shape=(COUNT,), start=0, end=size)], {})
        parts, encoding = encode_parts("tested", header, memoryview(bytes(size)), [(0, size, 4)])
        assert encoding is not None, (
            "the encoded header begins with a number that safetensors could take for a size"
        )
        with pytest.raises(SafetensorError):
            safetensors.numpy.load(b"".join(parts))

    @pytest.mark.parametrize("place", range(8))
    def test_damage_raises_nothing_else_than_value_error(self, transform: FileTransform, place: int) -> None:
        """The digest of the block finds damage first; a decoder sees it only where that was forged."""
        data = bytes(range(256)) * (COUNT // 256)
        encoded = transform.encode(memoryview(data), 1)
        assert encoded is not None
        at = place * len(encoded) // 8
        damaged = encoded[:at] + bytes([encoded[at] ^ 0xFF]) + encoded[at + 1 :]
        room = bytearray(b"\xaa" * (len(data) + 64))
        with contextlib.suppress(ValueError):
            transform.decode(memoryview(damaged), memoryview(room)[: len(data)])
        assert room[len(data) :] == b"\xaa" * 64, "it writes beyond the block"


def decoded(transform: FileTransform, encoded: bytes, size: int) -> memoryview:
    out = memoryview(bytearray(size))
    transform.decode(memoryview(encoded), out)
    return out
