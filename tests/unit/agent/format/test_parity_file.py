"""The layout of parity files."""

import random

import pytest
import xxhash

from holdfast.format.parity_file import ENTRY_BYTES, PARITY_BLOCK_BYTES, ParityCode, parse_parity
from holdfast.format.parity_stripes import StripeLayout, build_parity

SIZES = [0, 1, 4095, 4096, 4097, 40_960, 40_961, 1_000_000, 3_000_000]


@pytest.mark.parametrize("code", [ParityCode(10, 2), ParityCode(32, 1), ParityCode(1, 1), ParityCode(3, 3)])
@pytest.mark.parametrize("size", SIZES)
def test_every_block_of_a_file_has_a_digest_and_a_place_in_one_stripe(code, size):
    data = random.Random(size).randbytes(size)
    found, entry = build_parity(code, "rank-3.safetensors", [data[:8192], data[8192:]])
    layout = StripeLayout(code, size)
    assert (entry.name, entry.size_bytes, entry.code) == ("rank-3.parity", len(found), code)
    assert entry.digest == xxhash.xxh3_128_hexdigest(found)
    assert entry.fault("rank-3.safetensors", size) is None
    table = found[: layout.table_bytes]
    assert table == found[layout.copy_start :]
    blocks = [data[at : at + PARITY_BLOCK_BYTES] for at in range(0, size, PARITY_BLOCK_BYTES)]
    for number, block in enumerate(blocks):
        assert table[number * ENTRY_BYTES :][:ENTRY_BYTES] == xxhash.xxh3_64_digest(block)
    cut = [layout.data_range(row, stripe) for row in range(code.data_blocks) for stripe in range(layout.stripes)]
    assert b"".join(data[start:end] for start, end in cut) == data
    for row in range(code.parity_blocks):
        for stripe in range(layout.stripes):
            start, end = layout.parity_range(row, stripe)
            digest = table[layout.parity_entry(row, stripe) * ENTRY_BYTES :][:ENTRY_BYTES]
            assert digest == xxhash.xxh3_64_digest(found[start:end])


def test_the_first_parity_row_is_the_exclusive_or_of_the_rows_of_data():
    code, data = ParityCode(4, 1), random.Random(1).randbytes(600_000)
    found, _ = build_parity(code, "a.safetensors", [data])
    layout = StripeLayout(code, len(data))
    rows = [data[layout.row_bytes * n :][: layout.row_bytes].ljust(layout.row_bytes, b"\0") for n in range(4)]
    start, _ = layout.parity_range(0, 0)
    total = 0
    for row in rows:
        total ^= int.from_bytes(row, "little")
    assert total == int.from_bytes(found[start : start + layout.row_bytes], "little")


@pytest.mark.parametrize("text", ["10+2", " 10 + 2 ", ParityCode(10, 2)])
def test_parity_is_given_as_data_and_parity_blocks(text):
    assert parse_parity(text) == ParityCode(10, 2)


@pytest.mark.parametrize("text", ["important 10+2", " Important  10 + 2", ParityCode(10, 2, is_important=True)])
def test_parity_of_important_bytes_is_given_by_name(text):
    assert parse_parity(text) == ParityCode(10, 2, is_important=True)
    assert str(parse_parity(text)) == "important 10+2"


def test_parity_is_switched_off():
    assert parse_parity("off") is parse_parity(" OFF") is None


@pytest.mark.parametrize(
    "text", ["", "10", "10+0", "0+2", "10+4", "129+1", "a+b", "10+2+1", "important", "important10+2"]
)
def test_a_code_that_does_not_exist_is_refused(text):
    with pytest.raises(ValueError, match=r"parity=.*: give off, or data and parity blocks as in 10\+2"):
        parse_parity(text)
