"""Restores of encoded checkpoints from the disk, and the cost of an encoding that finds nothing."""

from __future__ import annotations

import itertools
import mmap
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.disk import opened
from benchmarks.harness import cost_of, median_seconds, scratch
from holdfast.codecs import planes
from holdfast.format import manifest as fmt
from holdfast.system.host_memory import fresh_memory

from . import differences
from .methods import BLOCK_BYTES, Block

DIRECTORY = "/var/tmp"  # on a disk, unlike /tmp on some machines
THREADS = 4
SMALLEST_FILE_BYTES = 256_000_000


class RestoreCost(NamedTuple):
    """Of reading, decoding and verifying a checkpoint."""

    plain_mb_s: float
    slowdown: float
    """Elapsed time relative to a plain checkpoint."""
    plain_cpu_seconds_per_gb: float
    cpu_seconds_per_gb: float


def restore_cost(state: list[Block], least_gain_of_base: float, rounds: int) -> RestoreCost:
    """Read, decode and verify a checkpoint from the disk, and a plain one, by turns.

    The blocks are those of the state, repeated until the plain file has 256 MB. Each is read with direct I/O,
    decoded and hashed by one of several threads. A base is read and hashed as well where it is needed. Decoded
    blocks and plain ones are in fresh memory, as those of a restore.
    """
    parts = [_Part(block, least_gain_of_base) for block in _by_kind(state)] * 1000
    sizes = itertools.accumulate(len(part.block.data) for part in parts)
    parts = parts[: 1 + sum(size < SMALLEST_FILE_BYTES for size in sizes)]
    with scratch(DIRECTORY) as place, ThreadPoolExecutor(THREADS) as pool:
        plain, other, base = (place / name for name in ("plain", "encoded", "base"))
        places = zip(
            _write(plain, [part.block.data for part in parts]), _write(other, [part.encoded for part in parts]),
            _write(base, [part.block.base for part in parts]), parts, strict=True,
        )  # fmt: skip

        def read_plain(at: tuple[int, int, int, _Part]) -> None:
            assert fmt.digest(_read(plain, at[0], len(at[3].block.data))) == at[3].digest

        def read_encoded(at: tuple[int, int, int, _Part]) -> None:
            part, earlier = at[3], None
            stored = _read(other, at[1], len(part.encoded), _scratch("stored"))
            fmt.digest(stored)
            if differences.needs_base(stored):
                earlier = _read(base, at[2], len(part.block.base), _scratch("base"))
                fmt.digest(earlier)
            out = memoryview(fresh_memory(len(part.block.data)))
            differences.decode(stored, out, earlier)
            assert fmt.digest(out) == part.digest

        blocks, costs = list(places), dict[Any, list[tuple[float, float]]]()
        for read in (read_plain, read_encoded) * (2 * rounds):
            *cost, _ = cost_of(lambda: list(pool.map(read, blocks)))  # noqa: B023
            costs.setdefault(read, []).append(tuple(cost))
    (took, cpu), (other_took, other_cpu) = (map(min, zip(*each, strict=True)) for each in costs.values())
    gigabytes = sum(len(part.block.data) for part in parts) / 1e9
    return RestoreCost(1e3 * gigabytes / took, other_took / took, cpu / gigabytes, other_cpu / gigabytes)


class _Part:
    """A block, encoded, and its digest."""

    def __init__(self, block: Block, least_gain_of_base: float) -> None:
        encoded = differences.encode(block.data, block.width, block.base, least_gain_of_base)
        assert encoded is not None
        self.block, self.encoded, self.digest = block, encoded, fmt.digest(block.data)


def _by_kind(state: list[Block]) -> list[Block]:
    """Return one block for all weights, one for all first moments, and so on, as large tensors would have."""
    kinds: dict[str, list[Block]] = {}
    for block in state:
        kinds.setdefault(block.name.partition(".")[0], []).append(block)
    found = []
    for name, blocks in kinds.items():
        data, base = (np.concatenate([getattr(block, side) for block in blocks]) for side in ("data", "base"))
        found.append(Block(name, data[:BLOCK_BYTES], base[:BLOCK_BYTES], blocks[0].width, _NO_DIGESTS, False))
    return found


_NO_DIGESTS = np.empty((0, 2), np.uint64)


def off_overhead(rounds: int) -> float:
    """Return the share by which a sample that finds nothing lengthens hashing and writing a block to the disk."""
    data = np.frombuffer(random.Random(1).randbytes(BLOCK_BYTES), np.uint8)

    def sample() -> None:
        assert planes.encode(data, 4) is None

    with scratch(DIRECTORY) as place:
        sampling, writing = median_seconds(
            10 * rounds, sample, lambda: (fmt.digest(data), _write(place / "block", [data]))
        )
    return sampling / writing


def _write(file: Path, contents: list[Any]) -> list[int]:
    """Write contents, each from a multiple of 4096 bytes on, and return where."""
    places, place = [], 0
    with opened(file, os.O_CREAT | os.O_WRONLY | os.O_DIRECT) as fd:
        for content in contents:
            memory = mmap.mmap(-1, _stride(len(content)))
            memory[: len(content)] = bytes(content)
            os.pwrite(fd, memory, place)
            places.append(place)
            place += len(memory)
        os.fsync(fd)
    return places


def _read(file: Path, place: int, size: int, memory: mmap.mmap | None = None) -> memoryview:
    memory = memory or fresh_memory(_stride(size))
    with opened(file, os.O_RDONLY | os.O_DIRECT) as fd:
        assert os.preadv(fd, [memoryview(memory)[: _stride(size)]], place) >= size
    return memoryview(memory)[:size]


def _scratch(name: str) -> mmap.mmap:
    """Return memory of this thread, which is used again for every block."""
    if not hasattr(_OF_THREAD, name):
        setattr(_OF_THREAD, name, fresh_memory(BLOCK_BYTES))
    found: mmap.mmap = getattr(_OF_THREAD, name)
    return found


_OF_THREAD = threading.local()


def _stride(size: int) -> int:
    return -(-size // fmt.BLOCK_BYTES) * fmt.BLOCK_BYTES
