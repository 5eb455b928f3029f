"""Byte planes: every block comes back to the bit, and a damaged encoding is refused by name."""

import random
import struct
import tracemalloc

import numpy as np
import pytest
import torch

from holdfast.codecs import planes
from holdfast.codecs.planes import DamagedEncoding, decode, encode

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


def round_trip(data, width, least_gain=ALWAYS):
    encoded = encode(data, width, least_gain)
    assert encoded is not None
    out = bytearray(len(data))
    decode(encoded, out)
    assert out == bytes(data)
    return encoded


def test_a_thousand_blocks_of_every_dtype_come_back_to_the_bit():
    rng = torch.Generator().manual_seed(5)
    for case in range(CASES):
        dtype = list(WIDTHS)[case % len(WIDTHS)]
        shape = SHAPES[int(torch.randint(len(SHAPES), (), generator=rng))]
        round_trip(raw(tensor_of(rng, dtype, shape)), WIDTHS[dtype])


def test_bytes_behind_the_last_whole_number_are_kept():
    rng = random.Random(1)
    for width in (2, 4, 8):
        for count in range(1, 2 * width):
            round_trip(rng.randbytes(count), width)


def test_every_bit_pattern_of_a_number_comes_back():
    round_trip(np.arange(1 << 16, dtype=np.uint16).view(np.uint8), 2)


def weights(count=1 << 20, seed=1):
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)) * 0.02


def test_weights_become_smaller():
    data = weights()
    assert len(round_trip(raw(data), 4, 0.1)) < 0.87 * data.nbytes


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_random_bytes_are_not_encoded(width):
    data = random.Random(2).randbytes(1 << 20)
    assert encode(data, width) is None


def test_a_block_that_compresses_only_where_the_sample_is_taken_is_not_encoded():
    numbers = np.frombuffer(random.Random(3).randbytes(4 << 20), np.uint32).copy()
    numbers[planes._sample(len(numbers))] = 0
    assert encode(numbers.view(np.uint8), 4, least_gain=0.5) is None


def test_a_wrong_width_is_refused():
    with pytest.raises(ValueError, match="width is 3"):
        encode(b"123", 3)


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
    data = raw(weights(50_000))
    encodings = [encode(data, 4, ALWAYS), encode(data, 2, ALWAYS), encode(data, 1, ALWAYS)]
    out = bytearray(len(data))
    refused = 0
    for case in range(CASES):
        try:
            decode(damaged(rng, encodings[case % 3]), out)
        except DamagedEncoding:
            refused += 1
    assert refused > CASES / 2


def test_the_wrong_length_and_a_cut_header_are_named():
    encoded = encode(raw(weights(50_000)), 4)
    with pytest.raises(DamagedEncoding, match="the block has 199999 bytes, and its encoding 200000"):
        decode(encoded, bytearray(199_999))
    with pytest.raises(DamagedEncoding, match="cut off"):
        decode(b"HFbp", bytearray(4))


def test_a_frame_that_would_become_huge_takes_no_memory():
    bomb = planes.NumberCompressor().compress(bytes(256 << 20))
    count = 64 << 10
    encoded = planes._HEADER.pack(b"HFbp", 1, bytes(3), count) + struct.pack("<I", len(bomb)) + bomb
    assert len(bomb) < count
    tracemalloc.start()
    try:
        with pytest.raises(DamagedEncoding):
            decode(encoded, bytearray(count))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
