"""The erasure code: any losses within its strength are recovered bit for bit, and no others."""

import itertools
import random

import pytest

from holdfast.codecs.parity import TooManyLost, encode, recover

CASES = 300


def rows_of(rng, count, row_bytes):
    """Random rows; the last few may be shorter or empty, as at the end of a file."""
    rows = [rng.randbytes(row_bytes) for _ in range(count)]
    short = rng.randrange(min(3, count) + 1)
    for index in range(count - short, count):
        rows[index] = rows[index][: rng.randrange(row_bytes + 1)]
    return rows


def whole(row, row_bytes):
    return bytes(row).ljust(row_bytes, b"\0")


def test_any_losses_within_the_strength_are_recovered_bit_for_bit():
    rng = random.Random(20)
    for _ in range(CASES):
        count, parity_rows = rng.choice([1, 2, 3, 10, 32, 128]), rng.randrange(1, 4)
        row_bytes = 8 * rng.randrange(1, 20)
        data = rows_of(rng, count, row_bytes)
        parity = encode(data, parity_rows, row_bytes)
        lost = rng.sample(range(count + parity_rows), min(count, rng.randrange(parity_rows + 1)))
        left = [None if n in lost else row for n, row in enumerate([*data, *parity])]
        found = recover(left[:count], left[count:], row_bytes)
        assert sorted(found) == sorted(n for n in lost if n < count)
        for index, row in found.items():
            assert bytes(row) == whole(data[index], row_bytes)


@pytest.mark.parametrize("parity_rows", [1, 2, 3])
def test_every_combination_of_losses_is_recovered(parity_rows):
    rng = random.Random(parity_rows)
    count, row_bytes = 9, 16
    data = [rng.randbytes(row_bytes) for _ in range(count)]
    every = [*data, *encode(data, parity_rows, row_bytes)]
    for lost in itertools.combinations(range(len(every)), parity_rows):
        left = [None if n in lost else row for n, row in enumerate(every)]
        for index, row in recover(left[:count], left[count:], row_bytes).items():
            assert bytes(row) == data[index]


def test_one_loss_more_is_refused():
    rng = random.Random(3)
    for parity_rows in (1, 2, 3):
        data = [rng.randbytes(64) for _ in range(10)]
        parity = encode(data, parity_rows, 64)
        lost = [None] * (parity_rows + 1) + data[parity_rows + 1 :]
        with pytest.raises(TooManyLost, match=f"{parity_rows + 1} rows are lost"):
            recover(lost, parity, 64)
        with pytest.raises(TooManyLost):
            recover([None, *data[1:]], [None] * parity_rows, 64)


def test_one_parity_row_is_the_exclusive_or_of_all_rows():
    assert bytes(encode([b"\1" * 8, b"\2" * 8, b"\4" * 8], 1, 8)[0]) == b"\7" * 8


def test_rows_of_no_bytes_have_parity_of_no_bytes():
    assert [bytes(row) for row in encode([b"", b""], 2, 0)] == [b"", b""]
    assert {index: bytes(row) for index, row in recover([None, b""], [b"", None], 0).items()} == {0: b""}
