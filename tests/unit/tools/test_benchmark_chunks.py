"""Incremental blocks: every block comes back to the bit, in little metadata, and damage is refused by name."""

import random
import struct
import tracemalloc

import numpy as np
import pytest

from benchmarks.codecs import chunks
from benchmarks.codecs.chunks import decode, digests, encode
from holdfast.codecs.planes import DamagedEncoding

CASES = 1000
ALWAYS = float("-inf")  # a gain that every encoding has
MEGABYTE = 1 << 20


def random_bytes(count, seed=1):
    return np.frombuffer(random.Random(seed).randbytes(count), np.uint8).copy()


def round_trip(data, base, chunk_bytes=128, verify=None):
    encoded = encode(data, digests(base, chunk_bytes), len(base), chunk_bytes, verify=verify, least_gain=ALWAYS)
    out = bytearray(len(data))
    decode(encoded, out, base)
    assert out == bytes(data)
    return encoded


def metadata_bytes(encoded):
    return chunks._HEADER.size + chunks._HEADER.unpack_from(encoded)[-1]


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
        chunk_bytes = rng.choice([128, 256, 512, 1024, 2048, 4096])
        round_trip(changed(rng, base), base, chunk_bytes, base if rng.randrange(2) else None)


def test_a_chain_of_fifty_states_comes_back():
    rng = random.Random(7)
    base = random_bytes(50_000)
    for _ in range(50):
        data = changed(rng, base)
        round_trip(data, base, 256)
        base = data


def test_a_base_that_does_not_begin_at_a_word_is_read():
    base = random_bytes(10_001)
    round_trip(base[1:], base[1:].copy())
    assert np.array_equal(digests(base[1:], 128), digests(base[1:].copy(), 128))


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


def test_different_chunks_with_equal_digests_are_both_stored(monkeypatch):
    monkeypatch.setattr(
        chunks, "digests", lambda data, size: np.ones((-(-len(bytes(data)) // size), 2), np.uint64)
    )
    base, data = random_bytes(10_050), random_bytes(10_050, 2)
    data[:1280] = base[:1280]
    encoded = encode(data, chunks.digests(base, 128), len(base), 128, verify=base, least_gain=ALWAYS)
    out = bytearray(len(data))
    decode(encoded, out, base)
    assert out == bytes(data)
    assert len(encoded) >= len(data) - 1280


def test_any_single_bit_changes_the_digest():
    data = random_bytes(1024)
    for size in (128, 1024):
        found = {digests(data, size).tobytes()}
        for bit in range(0, 8192, 7):
            other = data.copy()
            other[bit // 8] ^= 1 << bit % 8
            found.add(digests(other, size).tobytes())
        assert len(found) == 1 + len(range(0, 8192, 7))
    short = [digests(np.zeros(count, np.uint8), 128).tobytes() for count in range(1, 129)]
    assert len(set(short)) == 128


def test_chunks_that_differ_in_a_few_bits_of_neighboring_words_have_different_digests():
    one = np.uint64(1) << np.arange(64, dtype=np.uint64)
    words = np.zeros((64 * 64, 16), np.uint64)
    words[:, 0], words[:, 1] = np.repeat(one, 64), np.tile(one, 64)
    for pattern in (np.zeros(16, np.uint64), np.full(16, 0x3F8000003F800000, np.uint64)):
        found = digests((words ^ pattern).view(np.uint8).ravel(), 128)
        assert [len(np.unique(found[:, lane])) for lane in range(2)] == [len(words)] * 2


def test_a_state_in_which_everything_changed_is_not_encoded():
    base, data = random_bytes(MEGABYTE), random_bytes(MEGABYTE, 2)
    assert encode(data, digests(base, 128), len(base), 128) is None
    data[: int(0.95 * MEGABYTE)] = base[: int(0.95 * MEGABYTE)]
    assert encode(data, digests(base, 128), len(base), 128) is not None


def test_other_sizes_of_chunks_are_refused():
    for size in (0, 64, 100, 384, 8192):
        with pytest.raises(ValueError, match=f"chunk_bytes is {size}; it must be 128"):
            digests(b"", size)


def test_a_damaged_encoding_is_refused_or_gives_a_block_of_the_right_length():
    rng = random.Random(13)
    base = random_bytes(100_050)
    data = base.copy()
    data[::5000] ^= 1
    data[20_000:40_000] = data[60_000:80_000]
    data[-30_000:-20_000] = data[:10_000]
    encoded = encode(data, digests(base, 128), len(base), 128)
    refused = 0
    for _ in range(CASES):
        harmed = bytearray(encoded)
        for _ in range(rng.randrange(1, 4)):
            harmed[rng.randrange(metadata_bytes(encoded))] ^= 1 << rng.randrange(8)
        if not rng.randrange(4):
            harmed = harmed[: rng.randrange(len(harmed))]
        try:
            decode(bytes(harmed), bytearray(len(data)), base)
        except DamagedEncoding:
            refused += 1
    assert refused > CASES / 2


def forged(kinds, lengths, sources, steps, new=b"", count=1280, base=1280):
    kinds = np.array(kinds, np.uint8)
    copied = kinds >= 2
    listed = chunks._listed(
        kinds, np.array(lengths), np.where(copied, np.array(sources), 0), np.array(steps, np.uint8)
    )
    return (
        chunks._HEADER.pack(b"HFch", 128, count, base, len(kinds), int(copied.sum()), len(listed)) + listed + new
    )


@pytest.mark.parametrize(
    ("regions", "message"),
    [
        (([0], [9], [0], [1]), "contradicts itself"),
        (([0], [4_000_000_000], [0], [1]), "contradicts itself"),
        (([0, 0], [10, 0], [0, 0], [1, 1]), "contradicts itself"),
        (([9], [10], [0], [1]), "contradicts itself"),
        (([2], [10], [0], [7]), "contradicts itself"),
        (([1], [10], [0], [1]), "number of new chunks"),
        (([2], [10], [1], [1]), "beyond the end of its source"),
        (([2], [10], [4_000_000_000], [0]), "beyond the end of its source"),
        (([3], [10], [0], [0]), "beyond the end of its source"),
    ],
)
def test_regions_that_lead_outside_are_refused(regions, message):
    with pytest.raises(DamagedEncoding, match=message):
        decode(forged(*regions), bytearray(1280), bytes(1280))


def test_a_region_that_is_kept_beyond_the_end_of_the_base_is_refused():
    with pytest.raises(DamagedEncoding, match="beyond the end of the base"):
        decode(forged([0], [10], [0], [1], base=1279), bytearray(1280), bytes(1279))


def test_a_list_that_would_become_huge_takes_no_memory():
    bomb = chunks.compressed(bytes(256 << 20))
    encoded = chunks._HEADER.pack(b"HFch", 128, MEGABYTE, 0, 8192, 0, len(bomb)) + bomb
    out = bytearray(MEGABYTE)
    tracemalloc.start()
    try:
        with pytest.raises(DamagedEncoding):
            decode(encoded, out, b"")
        assert tracemalloc.get_traced_memory()[1] < MEGABYTE
    finally:
        tracemalloc.stop()


def test_another_base_is_refused_by_its_length():
    base = random_bytes(1280)
    with pytest.raises(DamagedEncoding, match="from a base of 1280, not 1280 from 1152"):
        decode(round_trip(base, base), bytearray(1280), base[128:])
    with pytest.raises(DamagedEncoding, match="cut off"):
        decode(struct.pack("<I", 1), bytearray(1280), base)
