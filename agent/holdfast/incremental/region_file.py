"""Region files: rows of the tensors of a base file that changed since an earlier checkpoint.

    8 bytes    MAGIC: safetensors takes it for the length of a header beyond its limit, and refuses the file
    8 bytes    length of the table, little-endian
    table      JSON: for each tensor, [start, end, leaf bytes, number of runs] in the plain file
    runs       for all tensors, first leaf and number of leaves of each run, 4 bytes each, little-endian
    leaves     the bytes of all runs

Does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from holdfast.errors import DamagedCheckpoint
from holdfast.format import manifest as fmt
from holdfast.format.encoding import StoredLayer
from holdfast.store.base import FileReader
from holdfast.system.host_memory import available_bytes, fresh_memory

MAGIC = b"HFrows01"
RUN_BYTES = 8
Numbers = Any
"""A NumPy array of integers."""


class RegionTensor(msgspec.Struct, frozen=True, array_like=True):
    """The place of a tensor in the plain file, and how many runs of its leaves are in the region file."""

    start: int
    end: int
    leaf_bytes: int
    runs: int


def runs_of(leaves: Numbers) -> Numbers:
    """Return the first leaf and the length of each run in ascending numbers of leaves."""
    import numpy as np

    borders = np.flatnonzero(np.diff(leaves) != 1) + 1
    firsts = np.concatenate([[0], borders]).astype(np.int64)
    counts = np.diff(np.concatenate([firsts, [len(leaves)]]))
    return np.stack([leaves[firsts], counts], axis=1).astype("<u4")


def encode_region(tensors: Sequence[tuple[int, int, int, Numbers]], leaves: Sequence[memoryview]) -> list[Any]:
    """Return the parts of a region file.

    Args:
        tensors: start and end in the plain file, leaf bytes, and numbers of leaves, for each tensor.
        leaves: the bytes of these leaves, in the same order.
    """
    runs = [runs_of(numbers) for *_, numbers in tensors]
    table = msgspec.json.encode(
        [
            RegionTensor(start, end, leaf_bytes, len(found))
            for (start, end, leaf_bytes, _), found in zip(tensors, runs, strict=True)
        ]
    )
    head = MAGIC + len(table).to_bytes(8, "little") + table
    return [head, *(memoryview(each).cast("B") for each in runs), *leaves]


class RegionLayer:
    """A region file in memory."""

    def __init__(self, tensors: Sequence[tuple[RegionTensor, Numbers, memoryview]]) -> None:
        self._tensors = tensors
        """Each tensor with the numbers of its leaves, in ascending order, and their bytes."""

    def lay_over(self, start: int, target: memoryview) -> None:
        """Replace the bytes that are in this file in a range of the plain file, which begins at `start`."""
        end = start + len(target)
        for tensor, leaves, rows in self._tensors:
            if start < tensor.end and tensor.start < end:
                _lay_over(tensor, leaves, rows, start, target)


def read_region(layer: StoredLayer, reader: FileReader) -> RegionLayer:
    """Read and verify a region file. Raises DamagedCheckpoint, which names it, OSError and MemoryError."""
    if reader.size_bytes != layer.size_bytes:
        reason = f"is {reader.size_bytes:,} bytes long, not {layer.size_bytes:,}"
        raise DamagedCheckpoint(layer.name, reason)
    if layer.size_bytes > available_bytes():  # the kernel would kill training
        raise MemoryError(f"{layer.name} of {layer.size_bytes:,} bytes does not fit into free memory")
    data = memoryview(fresh_memory(layer.size_bytes))[: layer.size_bytes]
    reader.read_into(0, data)
    if fmt.digest(data) != layer.digest:
        raise DamagedCheckpoint(layer.name, "does not match its digest")
    return RegionLayer(list(_parse(layer.name, data)))


def _parse(name: str, data: memoryview) -> Iterator[tuple[RegionTensor, Numbers, memoryview]]:
    import numpy as np

    at = 16 + int.from_bytes(data[8:16], "little")
    if data[:8] != MAGIC or at > len(data):
        raise DamagedCheckpoint(name, "is not a region file")
    try:
        tensors = msgspec.json.decode(data[16:at], type=list[RegionTensor])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DamagedCheckpoint(name, f"has no valid table: {error}") from None
    rows_at = at + RUN_BYTES * sum(each.runs for each in tensors)
    for each in tensors:
        if each.runs < 0 or each.leaf_bytes < 1 or not 0 <= each.start <= each.end or rows_at > len(data):
            raise DamagedCheckpoint(name, f"has the invalid entry {each}")
        runs = np.frombuffer(data[at : at + RUN_BYTES * each.runs], "<u4").reshape(-1, 2).astype(np.int64)
        at += RUN_BYTES * each.runs
        count = int(runs[:, 1].sum())
        if (count - 1) * each.leaf_bytes > len(data):  # before memory for that many is allocated
            raise DamagedCheckpoint(name, "is too short for its runs")
        offsets = np.repeat(runs[:, 0] - np.cumsum(runs[:, 1]) + runs[:, 1], runs[:, 1])
        leaves = offsets + np.arange(count)
        size_bytes = count * each.leaf_bytes
        if count:
            size_bytes -= max(0, each.start + (int(leaves[-1]) + 1) * each.leaf_bytes - each.end)
            is_sorted = bool((np.diff(leaves) > 0).all())
            if not is_sorted or each.start + int(leaves[-1]) * each.leaf_bytes >= each.end:
                raise DamagedCheckpoint(name, f"has runs outside of the tensor at {each.start:,}")
        if rows_at + size_bytes > len(data):
            raise DamagedCheckpoint(name, "is too short for its runs")
        yield each, leaves, data[rows_at : rows_at + size_bytes]
        rows_at += size_bytes
    if rows_at != len(data):
        raise DamagedCheckpoint(name, "is longer than its runs")


def _lay_over(tensor: RegionTensor, leaves: Numbers, rows: memoryview, start: int, target: memoryview) -> None:
    import numpy as np

    size, end = tensor.leaf_bytes, start + len(target)
    first = int(np.searchsorted(leaves, max(0, start - tensor.start) // size))
    last = int(np.searchsorted(leaves, -(-(min(end, tensor.end) - tensor.start) // size)))
    # leaves that only partly are in the range, or are shorter, are the first and the last ones
    inner, inner_end = first, last
    while inner < inner_end and tensor.start + int(leaves[inner]) * size < start:
        inner += 1
    while inner < inner_end and tensor.start + (int(leaves[inner_end - 1]) + 1) * size > min(end, tensor.end):
        inner_end -= 1
    for number in (*range(first, inner), *range(inner_end, last)):
        at = tensor.start + int(leaves[number]) * size
        row = rows[number * size : (number + 1) * size]
        opens, closes = max(at, start), min(at + len(row), end)
        target[opens - start : closes - start] = row[opens - at : closes - at]
    if inner == inner_end:
        return
    base = int(leaves[inner])
    at = tensor.start + base * size - start
    count = int(leaves[inner_end - 1]) - base + 1
    whole = np.dtype((np.void, size))  # copied as a whole, in half the time
    out = np.frombuffer(target[at : at + count * size], whole)
    out[leaves[inner:inner_end] - base] = np.frombuffer(rows[inner * size : inner_end * size], whole)
