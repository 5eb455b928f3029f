"""Region files: rows of the tensors of a base file that changed since an earlier checkpoint.

    8 bytes    MAGIC: safetensors takes it for the length of a header beyond its limit, and refuses the file
    8 bytes    length of the table, little-endian
    table      JSON: for each tensor, [start, end, leaf bytes, number of runs] in the plain file
    runs       for all tensors, first leaf and number of leaves of each run, 4 bytes each, little-endian
    leaves     the bytes of all runs

Does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from holdfast.errors import DamagedCheckpoint
from holdfast.format import manifest as fmt
from holdfast.format.encoding import StoredLayer
from holdfast.store.base import FileReader
from holdfast.system.host_memory import ThreadMemory, available_bytes, fresh_memory

MAGIC = b"HFrows01"
RUN_BYTES = 8
PIECE_BYTES = 256 << 10
"""Rows that are laid over at once: so much stays in the cache of a core."""
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


@dataclass(frozen=True, slots=True)
class RegionRows:
    """The rows of one tensor in a region file."""

    tensor: RegionTensor
    leaves: Numbers
    """In ascending order."""
    start: int
    """Where their bytes are in the region file."""
    end: int


class RegionLayer:
    """A region file, of which the numbers of the leaves are in memory.

    Args:
        read: returns the bytes of a range of the file, until the same thread calls it again.
    """

    def __init__(self, tensors: Sequence[RegionRows], read: Callable[[int, int], memoryview]) -> None:
        self._tensors, self._read = tensors, read

    @property
    def rows(self) -> dict[int, tuple[int, int]]:
        """How many leaves of each tensor it has, and their bytes, by where the tensor starts in the plain file."""
        return {each.tensor.start: (len(each.leaves), each.end - each.start) for each in self._tensors}

    def lay_over(self, start: int, target: memoryview) -> None:
        """Replace the bytes that are in this file in a range of the plain file, which begins at `start`."""
        end = start + len(target)
        for each in self._tensors:
            if start < each.tensor.end and each.tensor.start < end:
                _lay_over(each, self._read, start, target)


def require_memory(layers: Sequence[StoredLayer]) -> None:
    """Raise MemoryError where region files do not fit into free memory: the kernel would kill training."""
    size_bytes = sum(layer.size_bytes for layer in layers)
    if size_bytes > available_bytes():
        raise MemoryError(
            f"{layers[-1].name} and those before it, {size_bytes:,} bytes, do not fit into free memory"
        )


def read_region(layer: StoredLayer, reader: FileReader) -> RegionLayer:
    """Read and verify a region file. Raises DamagedCheckpoint, which names it, and OSError."""
    require_size(layer, reader)
    data = memoryview(fresh_memory(layer.size_bytes))[: layer.size_bytes]
    reader.read_into(0, data)
    if fmt.digest(data) != layer.digest:
        raise DamagedCheckpoint(layer.name, "does not match its digest")

    def read(start: int, end: int) -> memoryview:
        return data[start:end]

    return RegionLayer(list(_parse(layer, read)), read)


def open_region(layer: StoredLayer, reader: FileReader, memory: ThreadMemory) -> RegionLayer:
    """Return a region file whose rows are read when they are laid over; only its table is in memory.

    Its digest is not computed: the digests of the tensors show damage. Raises as `read_region`.
    """
    require_size(layer, reader)

    def read(start: int, end: int) -> memoryview:
        found = memory.of_thread(end - start)
        reader.read_into(start, found)
        return found

    return RegionLayer(list(_parse(layer, read)), read)


def require_size(layer: StoredLayer, reader: FileReader) -> None:
    """Raise DamagedCheckpoint where a region file has another size."""
    if reader.size_bytes != layer.size_bytes:
        reason = f"is {reader.size_bytes:,} bytes long, not {layer.size_bytes:,}"
        raise DamagedCheckpoint(layer.name, reason)


def _parse(layer: StoredLayer, read: Callable[[int, int], memoryview]) -> Iterator[RegionRows]:
    import numpy as np

    name, size_bytes = layer.name, layer.size_bytes
    start = bytes(read(0, min(16, size_bytes)))
    at = 16 + int.from_bytes(start[8:16], "little")
    if start[:8] != MAGIC or at > size_bytes:
        raise DamagedCheckpoint(name, "is not a region file")
    try:
        tensors = msgspec.json.decode(read(16, at), type=list[RegionTensor])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DamagedCheckpoint(name, f"has no valid table: {error}") from None
    rows_at = at + RUN_BYTES * sum(each.runs for each in tensors)
    for each in tensors:
        if each.runs < 0 or each.leaf_bytes < 1 or not 0 <= each.start <= each.end or rows_at > size_bytes:
            raise DamagedCheckpoint(name, f"has the invalid entry {each}")
        runs = np.frombuffer(read(at, at + RUN_BYTES * each.runs), "<u4").reshape(-1, 2).astype(np.int64)
        at += RUN_BYTES * each.runs
        count = int(runs[:, 1].sum())
        if (count - 1) * each.leaf_bytes > size_bytes:  # before memory for that many is allocated
            raise DamagedCheckpoint(name, "is too short for its runs")
        leaves = runs[:, 0].copy()
        if not (runs[:, 1] == 1).all():
            leaves = np.repeat(leaves - np.cumsum(runs[:, 1]) + runs[:, 1], runs[:, 1]) + np.arange(count)
        rows_bytes = count * each.leaf_bytes
        if count:
            rows_bytes -= max(0, each.start + (int(leaves[-1]) + 1) * each.leaf_bytes - each.end)
            is_sorted = bool((leaves[1:] > leaves[:-1]).all())
            if not is_sorted or each.start + int(leaves[-1]) * each.leaf_bytes >= each.end:
                raise DamagedCheckpoint(name, f"has runs outside of the tensor at {each.start:,}")
        if rows_at + rows_bytes > size_bytes:
            raise DamagedCheckpoint(name, "is too short for its runs")
        yield RegionRows(each, leaves, rows_at, rows_at + rows_bytes)
        rows_at += rows_bytes
    if rows_at != size_bytes:
        raise DamagedCheckpoint(name, "is longer than its runs")


def _lay_over(region: RegionRows, read: Callable[[int, int], memoryview], start: int, target: memoryview) -> None:
    import numpy as np

    tensor, leaves, size = region.tensor, region.leaves, region.tensor.leaf_bytes
    first = int(np.searchsorted(leaves, max(0, start - tensor.start) // size))
    end = min(start + len(target), tensor.end)
    last = int(np.searchsorted(leaves, -(-(end - tensor.start) // size)))
    at_once = max(1, PIECE_BYTES // size)
    for at in range(first, last, at_once):
        to = min(at + at_once, last)
        rows = read(region.start + at * size, min(region.start + to * size, region.end))
        _put(tensor, leaves[at:to], rows, start, target)


def _put(tensor: RegionTensor, leaves: Numbers, rows: memoryview, start: int, target: memoryview) -> None:
    """Put rows in their places, as far as they are in the range of the plain file that begins at `start`."""
    import numpy as np

    size, end = tensor.leaf_bytes, min(start + len(target), tensor.end)
    # leaves that only partly are in the range, or are shorter, are the first and the last ones
    inner, inner_end = 0, len(leaves)
    while inner < inner_end and tensor.start + int(leaves[inner]) * size < start:
        inner += 1
    while inner < inner_end and tensor.start + (int(leaves[inner_end - 1]) + 1) * size > end:
        inner_end -= 1
    for number in (*range(inner), *range(inner_end, len(leaves))):
        at = tensor.start + int(leaves[number]) * size
        row = rows[number * size : (number + 1) * size]
        opens, closes = max(at, start), min(at + len(row), end)
        target[opens - start : closes - start] = row[opens - at : closes - at]
    if inner == inner_end:
        return
    base = int(leaves[inner])
    at = tensor.start + base * size - start
    count = int(leaves[inner_end - 1]) - base + 1
    if count == inner_end - inner:  # rows next to each other
        target[at : at + count * size] = rows[inner * size : inner_end * size]
        return
    whole = np.dtype((np.void, size))  # copied as a whole, in half the time
    out = np.frombuffer(target[at : at + count * size], whole)
    out[leaves[inner:inner_end] - base] = np.frombuffer(rows[inner * size : inner_end * size], whole)
