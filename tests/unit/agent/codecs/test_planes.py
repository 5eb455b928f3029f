"""Byte planes: every block comes back to the bit, and a damaged encoding is refused by name."""

import random
import struct
import tracemalloc

import numpy as np
import pytest
import torch

from holdfast.codecs import frames, planes
from holdfast.codecs.frames import DamagedEncoding
from holdfast.codecs.planes import decode, encode, needs_base

CASES = 1000
ALWAYS = float("-inf")  # a gain that every encoding has

WIDTHS = {
    torch.float64: 8,
    torch.float32: 4,
    torch.float16: 2,
    torch.bfloat16: 2,
    torch.float8_e4m3fn: 1,
    torch.float8_e5m2: 1,
    torch.complex64: 4,
    torch.complex128: 8,
    torch.int64: 8,
    torch.int32: 4,
    torch.int16: 2,
    torch.uint8: 1,
    torch.bool: 1,
}
SHAPES = [(), (0,), (3, 0, 2), (1,), (7,), (33, 5), (1000,), (129, 257), (40_000,), (2, 270_001)]


def raw(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy() if tensor.numel() else np.empty(0, np.uint8)


def tensor_of(rng, dtype, shape):
    values = torch.randn(shape, generator=rng) * 10 ** (torch.rand((), generator=rng) * 6 - 3)
    return (
        torch.complex(values, values.flip(-1) if shape else -values).to(dtype)
        if dtype.is_complex
        else values.to(dtype)
    )


def near(rng, tensor):
    """A state a few iterations earlier or later, or something else altogether."""
    kind = int(torch.randint(4, (), generator=rng))
    data = raw(tensor).copy()
    if kind == 0 or not len(data):
        return data
    if kind == 1:
        data[int(torch.randint(len(data), (), generator=rng)) :] ^= 0xFF
    elif kind == 2 and tensor.dtype in (torch.float32, torch.float64, torch.bfloat16):
        data = raw(tensor * (1 + 1e-4 * torch.randn(tensor.shape, generator=rng)).to(tensor.dtype))
    else:
        data = np.frombuffer(random.Random(kind).randbytes(len(data)), np.uint8)
    return data


def round_trip(data, width, base=None, least_gain=ALWAYS):
    encoded = encode(data, width, base, least_gain)
    assert encoded is not None
    out = bytearray(len(data))
    decode(encoded, out, base)
    assert out == bytes(data)
    return encoded


def test_a_thousand_blocks_of_every_dtype_come_back_to_the_bit():
    rng = torch.Generator().manual_seed(5)
    used = set()
    for case in range(CASES):
        dtype = list(WIDTHS)[case % len(WIDTHS)]
        shape = SHAPES[int(torch.randint(len(SHAPES), (), generator=rng))]
        tensor = tensor_of(rng, dtype, shape)
        base = near(rng, tensor) if case % 2 else None
        encoded = round_trip(raw(tensor), WIDTHS[dtype], base)
        used.add(needs_base(encoded))
    assert used == {True, False}


def test_bytes_behind_the_last_whole_number_are_kept():
    rng = random.Random(1)
    for width in (2, 4, 8):
        for count in range(1, 2 * width):
            data = rng.randbytes(count)
            round_trip(data, width)
            round_trip(data, width, data)


def test_every_bit_pattern_of_a_number_comes_back():
    every = np.arange(1 << 16, dtype=np.uint16)
    for base in (None, every[::-1].copy(), np.zeros_like(every), np.full_like(every, 0x8000)):
        round_trip(every.view(np.uint8), 2, None if base is None else base.view(np.uint8))
    patterns = np.array(
        [0, 1, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 1, 0x7F800000, 0xFF800000, 0x7FC00001], np.uint32
    )
    pairs = np.array([(a, b) for a in patterns for b in patterns], np.uint32)
    round_trip(pairs[:, 0].tobytes(), 4, pairs[:, 1].tobytes())


def weights(count=1 << 20, seed=1):
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)) * 0.02


def test_weights_become_smaller_and_differences_more_so():
    base = weights()
    data = base + 1e-6 * weights(seed=2)
    alone, against = round_trip(raw(data), 4, None, 0.1), round_trip(raw(data), 4, raw(base), 0.1)
    assert (needs_base(alone), needs_base(against)) == (False, True)
    assert len(alone) < 0.87 * data.nbytes
    assert len(against) < 0.5 * data.nbytes


def test_a_base_that_does_not_help_is_not_used():
    encoded = encode(raw(weights()), 4, raw(weights(seed=2)))
    assert encoded is not None
    assert not needs_base(encoded)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_random_bytes_are_not_encoded(width):
    data = random.Random(2).randbytes(1 << 20)
    assert encode(data, width) is None
    assert encode(data, width, data[::-1]) is None


def test_a_block_that_compresses_only_where_the_sample_is_taken_is_not_encoded():
    numbers = np.frombuffer(random.Random(3).randbytes(4 << 20), np.uint32).copy()
    numbers[planes._sample(len(numbers))] = 0
    assert encode(numbers.view(np.uint8), 4, least_gain=0.5) is None


def test_a_wrong_width_and_a_base_of_another_length_are_refused():
    with pytest.raises(ValueError, match="width is 3"):
        encode(b"123", 3)
    with pytest.raises(ValueError, match="the base has 8 bytes, the block 4"):
        encode(bytes(4), 4, bytes(8))


def damaged(rng, encoded):
    kind, place = rng.randrange(5), rng.randrange(len(encoded))
    if kind == 0:
        return encoded[:place]
    if kind == 1:
        return encoded + rng.randbytes(rng.randrange(1, 100))
    if kind == 2:
        return encoded[:place] + rng.randbytes(8) + encoded[place + 8 :]
    if kind == 3:
        return rng.randbytes(40) + encoded[40:]
    found = bytearray(encoded)
    found[rng.randrange(min(40, len(found)))] ^= 1 << rng.randrange(8)
    return bytes(found)


def test_a_damaged_encoding_is_refused_or_gives_a_block_of_the_right_length():
    rng = random.Random(4)
    base = raw(weights(50_000))
    data = raw(torch.from_numpy(base.copy()).view(torch.float32) * 1.0001)
    encodings = [encode(data, 4, None, ALWAYS), encode(data, 4, base, ALWAYS), encode(data, 1, None, ALWAYS)]
    out = bytearray(len(data))
    refused = 0
    for case in range(CASES):
        try:
            decode(damaged(rng, encodings[case % 3]), out, base)
        except DamagedEncoding:
            refused += 1
    assert refused > CASES / 2


def test_the_wrong_length_and_a_missing_base_are_named():
    base = raw(weights(50_000))
    encoded = encode(raw(torch.from_numpy(base.copy()).view(torch.float32) * 1.0001), 4, base)
    with pytest.raises(DamagedEncoding, match="the block has 199999 bytes, and its encoding 200000"):
        decode(encoded, bytearray(199_999), base)
    for missing in (None, base[1:]):
        with pytest.raises(DamagedEncoding, match="its base of 200000 bytes is missing"):
            decode(encoded, bytearray(200_000), missing)
    with pytest.raises(DamagedEncoding, match="cut off"):
        needs_base(b"HFbp")


def test_a_frame_that_would_become_huge_takes_no_memory():
    bomb = frames.compress(bytes(256 << 20))
    count = 64 << 10
    encoded = planes._HEADER.pack(b"HFbp", 1, 0, 0, count) + struct.pack("<I", len(bomb)) + bomb
    assert len(bomb) < count
    tracemalloc.start()
    try:
        with pytest.raises(DamagedEncoding):
            decode(encoded, bytearray(count))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
