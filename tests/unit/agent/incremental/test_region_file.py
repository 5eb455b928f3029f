import random

import pytest

from holdfast.errors import DamagedCheckpoint
from holdfast.format import manifest as fmt
from holdfast.format.encoding import StoredLayer
from holdfast.incremental import region_file
from holdfast.incremental.region_file import encode_region, open_region, read_region
from holdfast.store.base import FileReader
from holdfast.system.host_memory import ThreadMemory

np = pytest.importorskip("numpy")

START, END, LEAF = 4096, 4096 + 64 * 50 + 20, 64
"""A tensor of 51 leaves, of which the last is shorter."""


class MemoryFile(FileReader):
    def __init__(self, data):
        self._data, self.size_bytes = data, len(data)

    def read_into(self, start, target):
        target[:] = self._data[start : start + len(target)]


def region_of(leaves, seed=0):
    """Return the bytes of a region file, and those of the leaves in it."""
    rows = random.Random(seed).randbytes(sum(min(LEAF, END - START - leaf * LEAF) for leaf in leaves))
    parts = encode_region([(START, END, LEAF, np.array(leaves))], [memoryview(rows)])
    return b"".join(parts), rows


def in_memory(layer, file):
    return read_region(layer, file)


def in_file(layer, file):
    return open_region(layer, file, ThreadMemory())


def opened(data, how=in_memory):
    return how(StoredLayer("rank-0.rows", len(data), fmt.digest(data)), MemoryFile(data))


def expected(plain, leaves, rows):
    laid = bytearray(plain)
    for number, leaf in enumerate(leaves):
        row = rows[number * LEAF : (number + 1) * LEAF]
        laid[START + leaf * LEAF : START + leaf * LEAF + len(row)] = row
    return bytes(laid)


@pytest.mark.parametrize("how", [in_memory, in_file])
@pytest.mark.parametrize("leaves", [[0], [50], [49, 50], [0, 1, 2, 7, 9, 10, 50], list(range(51))])
def test_any_range_is_laid_over_as_the_whole_is(leaves, how, monkeypatch):
    monkeypatch.setattr(region_file, "PIECE_BYTES", 5 * LEAF)
    data, rows = region_of(leaves)
    layer, plain = opened(data, how), random.Random(1).randbytes(END + 100)
    laid, draw = expected(plain, leaves, rows), random.Random(2)
    for _ in range(300):
        start = draw.randrange(len(plain))
        end = draw.randrange(start, len(plain)) + 1
        target = memoryview(bytearray(plain[start:end]))
        layer.lay_over(start, target)
        assert bytes(target) == laid[start:end], (start, end)


def test_a_run_takes_eight_bytes():
    one, _ = region_of([1, 2, 3])
    two, _ = region_of([1, 2, 9])
    assert len(two) - len(one) == 8


def test_a_file_that_is_not_what_was_written_is_refused():
    data, _ = region_of([3, 4])
    layer = StoredLayer("rank-0.rows", len(data), fmt.digest(data))
    for changed in (data[:-1], data + b"\0", data[:-1] + bytes([data[-1] ^ 1])):
        with pytest.raises(DamagedCheckpoint, match=r"rank-0\.rows"):
            read_region(layer, MemoryFile(changed))


def test_rows_that_are_read_later_have_no_digest_and_stay_within_the_tensor():
    data, _ = region_of([3, 4])
    for changed in (data[:-1], data + b"\0"):
        with pytest.raises(DamagedCheckpoint, match=r"rank-0\.rows: is \d+ bytes long"):
            in_file(StoredLayer("rank-0.rows", len(data), ""), MemoryFile(changed))


def test_files_of_an_incorrect_program_are_refused_or_stay_within_the_range():
    """Their digests are right: nothing but the content can show it."""
    data, _ = region_of([3, 4, 9, 50])
    draw, refused = random.Random(0), 0
    for _ in range(3000):
        changed = bytearray(data)
        for _ in range(draw.randint(1, 3)):
            changed[draw.randrange(8, 100)] = draw.choice([0, 1, 8, 48, 57, 127, 255, draw.randrange(256)])
        target = memoryview(bytearray(2000))
        try:
            opened(bytes(changed)).lay_over(START + 10, target)
        except DamagedCheckpoint:
            refused += 1
    assert refused > 1000
