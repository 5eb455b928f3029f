"""Incremental blocks: every block comes back to the bit, in little metadata."""

import random

import numpy as np
import pytest

from benchmarks.codecs.chunks import decode, digests, encode, metadata_bytes

CASES = 1000
ALWAYS = float("-inf")  # a gain that every encoding has
MEGABYTE = 1 << 20


def random_bytes(count, seed=1):
    return np.frombuffer(random.Random(seed).randbytes(count), np.uint8).copy()


def round_trip(data, base):
    encoded = encode(data, digests(base), len(base), least_gain=ALWAYS)
    out = bytearray(len(data))
    decode(encoded, out, base)
    assert out == bytes(data)
    return encoded


def changed(rng, base):
    """The next state: some parts of the base changed, moved, repeated or zeroed, and possibly another length."""
    data = base.copy()
    for _ in range(rng.randrange(4)):
        if not len(data):
            break
        start, length = rng.randrange(len(data)), rng.randrange(1, len(data) + 1)
        part = data[start : start + length]
        match rng.randrange(5):
            case 0:
                part[:] = np.frombuffer(rng.randbytes(len(part)), np.uint8)
            case 1:
                part[:] = rng.randrange(256)
            case 2:
                data = np.roll(data, rng.choice([1, 128, 128 * rng.randrange(100), rng.randrange(len(data))]))
            case 3:
                part[rng.randrange(len(part)) :: rng.randrange(1, 2000)] ^= 1
            case 4:
                part[:] = base[: len(part)]
    match rng.randrange(4):
        case 0:
            data = data[: rng.randrange(len(data) + 1)]
        case 1:
            data = np.append(data, np.frombuffer(rng.randbytes(rng.randrange(3000)), np.uint8))
    return np.ascontiguousarray(data)


def test_a_thousand_changed_blocks_come_back_to_the_bit():
    rng = random.Random(6)
    for _ in range(CASES):
        base = random_bytes(rng.choice([0, 1, 127, 128, 129, rng.randrange(100_000)]), rng.random())
        round_trip(changed(rng, base), base)


def test_a_chain_of_fifty_states_comes_back():
    rng = random.Random(7)
    base = random_bytes(50_000)
    for _ in range(50):
        data = changed(rng, base)
        round_trip(data, base)
        base = data


def test_a_base_that_does_not_begin_at_a_word_is_read():
    base = random_bytes(10_001)
    round_trip(base[1:], base[1:].copy())
    assert np.array_equal(digests(base[1:]), digests(base[1:].copy()))


def test_changed_chunks_at_random_places_take_little_more_than_themselves():
    base = random_bytes(MEGABYTE)
    data = base.copy()
    data.reshape(-1, 128)[random.Random(8).sample(range(8192), 82)] ^= 1
    encoded = round_trip(data, base)
    assert len(encoded) <= 0.012 * MEGABYTE
    assert metadata_bytes(encoded) <= 8 * 82


@pytest.mark.parametrize(
    ("change", "least", "most"),
    [
        pytest.param(lambda base: base.copy(), 0, 100, id="nothing"),
        pytest.param(lambda base: np.concatenate([base[:300_032], ~base[300_032:352_512], base[352_512:]]),
                     52_480, 52_580, id="one range"),
        pytest.param(lambda base: np.roll(base, 128 * 777), 0, 100, id="rolled"),
        pytest.param(lambda base: np.concatenate([base[MEGABYTE // 2 :], base[: MEGABYTE // 2]]),
                     0, 100, id="halves swapped"),
        pytest.param(lambda base: np.zeros_like(base), 128, 228, id="zeroed"),
        pytest.param(lambda base: base[: MEGABYTE // 2].copy(), 0, 100, id="shrunk"),
        pytest.param(lambda base: np.concatenate([base, base]), 0, 100, id="grown by a copy"),
    ],
)  # fmt: skip
def test_regions_are_consolidated(change, least, most):
    base = random_bytes(MEGABYTE)
    assert least <= len(round_trip(change(base), base)) <= most


def test_a_repetition_within_the_block_is_stored_once():
    piece = random_bytes(12_800, 9)
    data = np.concatenate([piece, random_bytes(1280, 10), piece, piece])
    encoded = round_trip(data, np.empty(0, np.uint8))
    assert len(encoded) < 12_800 + 1280 + 100


def test_a_block_like_an_older_one_is_restored_as_that_one():
    older, between = random_bytes(MEGABYTE, 11), random_bytes(MEGABYTE, 12)
    assert len(round_trip(between, older)) > MEGABYTE
    assert len(round_trip(older.copy(), older)) < 100  # referring to the older base, not to the one in between


def test_any_single_bit_changes_the_digest():
    data = random_bytes(1024)
    found = {digests(data).tobytes()}
    for bit in range(0, 8192, 7):
        other = data.copy()
        other[bit // 8] ^= 1 << bit % 8
        found.add(digests(other).tobytes())
    assert len(found) == 1 + len(range(0, 8192, 7))
    short = [digests(np.zeros(count, np.uint8)).tobytes() for count in range(1, 129)]
    assert len(set(short)) == 128


def test_chunks_that_differ_in_a_few_bits_of_neighboring_words_have_different_digests():
    one = np.uint64(1) << np.arange(64, dtype=np.uint64)
    words = np.zeros((64 * 64, 16), np.uint64)
    words[:, 0], words[:, 1] = np.repeat(one, 64), np.tile(one, 64)
    for pattern in (np.zeros(16, np.uint64), np.full(16, 0x3F8000003F800000, np.uint64)):
        found = digests((words ^ pattern).view(np.uint8).ravel())
        assert [len(np.unique(found[:, lane])) for lane in range(2)] == [len(words)] * 2


def test_a_state_in_which_everything_changed_is_not_encoded():
    base, data = random_bytes(MEGABYTE), random_bytes(MEGABYTE, 2)
    assert encode(data, digests(base), len(base)) is None
    data[: int(0.95 * MEGABYTE)] = base[: int(0.95 * MEGABYTE)]
    assert encode(data, digests(base), len(base)) is not None
