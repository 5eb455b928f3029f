"""The benchmark of encodings: sizes of Merkle trees, and methods that give every block back."""

import random

import numpy as np
import pytest
import torch

from benchmarks.codecs import checkpoints, differences, merkle
from benchmarks.codecs.methods import blocks, methods

MEGABYTE = 1 << 20


def stored(change):
    base = np.frombuffer(random.Random(1).randbytes(MEGABYTE), np.uint8)
    data = base.copy()
    return merkle.stored_bytes(change(data), merkle.BaseTree(base))


def zeroed_half(data):
    data[: MEGABYTE // 2] = 0
    return data


def changed_chunks(data):
    data.reshape(-1, 128)[random.Random(2).sample(range(8192), 82)] ^= 1
    return data


@pytest.mark.parametrize(
    ("change", "new_bytes", "least_roots", "most_roots"),
    [
        (lambda data: data, 0, 0, 0),
        (changed_chunks, 82 * 128, 75, 82),
        (lambda data: np.concatenate([data[MEGABYTE // 2 :], data[: MEGABYTE // 2]]), 0, 2, 2),
        (lambda data: np.roll(data, 128), 0, 8192, 8192),
        (zeroed_half, 128, 1, 4096),
    ],
)
def test_a_merkle_tree_stores_one_entry_for_each_subtree(change, new_bytes, least_roots, most_roots):
    new, metadata = stored(change)
    assert new == new_bytes
    roots = metadata - merkle.HEADER_BYTES
    assert merkle.FIRST_BYTES * least_roots <= roots <= merkle.SHIFTED_BYTES * most_roots


def test_every_method_gives_the_blocks_back():
    base = {"a": torch.randn(5000), "b": torch.randn(300).bfloat16(), "c": torch.zeros(0)}
    state = {"a": base["a"] * 1.0001, "b": base["b"], "c": base["c"]}
    for method in methods():
        if method.decode is None or method.name == "whole tensors":
            continue
        for block in blocks(state, base):
            if len(block.data):
                decoded = method.decode(method.encode(block), block)
                assert np.array_equal(np.frombuffer(decoded, np.uint8), block.data), method.name


def test_differences_of_any_bit_patterns_are_undone():
    patterns = [0, 1, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 1, 0x7F800000, 0xFF800000, 0x7FC00001]
    pairs = np.array([(a, b) for a in patterns for b in patterns] * 50, np.uint32)
    for data, base in ((pairs[:, 0], pairs[:, 1]), (pairs[:, 1], pairs[:, 1])):
        encoded = differences.encode(data.copy().view(np.uint8), 4, base.copy().view(np.uint8))
        out = bytearray(data.nbytes)
        differences.decode(encoded, out, base.copy().view(np.uint8))
        assert out == data.tobytes()
    assert differences.needs_base(encoded)


def test_the_costs_of_compressed_checkpoints_are_measured_beside_plain_ones(monkeypatch, tmp_path):
    monkeypatch.setattr(checkpoints, "DIRECTORY", str(tmp_path))
    weights = torch.randn(100_000, generator=torch.Generator().manual_seed(1))
    costs = checkpoints.measure(checkpoints.Payload({"w": weights}), 2)
    assert costs["compressed"]["stored_bytes"][0] < 0.9 * costs["plain"]["stored_bytes"][0]
    assert {len(each["restore"]) for each in costs.values()} == {2}
