"""Reads a checkpoint back, slowly and one piece after the other: is it still what was written, and what is in it?

    python -m holdfast.checkpoint.verification OPENER URL JOB CHECKPOINT BYTES_PER_SECOND [AGAINST]

A process of its own, since training must not share the interpreter lock, the threads of torch or the memory with
it. It tells what it found as lines of JSON, and ends with whoever started it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import pkgutil
import sys
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import torch

from holdfast.checkpoint import restore
from holdfast.checkpoint.reading import Run, near, runs_to_verify
from holdfast.errors import DamagedCheckpoint, HoldfastError
from holdfast.format import manifest as fmt
from holdfast.format.dtypes import DTYPES
from holdfast.persist.writer import RateLimiter
from holdfast.protocol.messages import MOST_TENSORS, TensorNorms, Verdict
from holdfast.store import Store
from holdfast.store.base import FileReader, Pace
from holdfast.system.io_pool import lower_cpu_priority
from holdfast.system.processes import raise_oom_score

STRETCH_BYTES = 16 << 20
"""Read at a time, and held in memory, or twice that where another checkpoint is read beside it."""
TOLD_EVERY_SECONDS = 1.0


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    read_bytes: int
    total_bytes: int


class Finding(msgspec.Struct, frozen=True, kw_only=True, tag="finding"):
    verdict: Verdict
    reason: str | None = None
    read_bytes: int = 0
    total_bytes: int = 0
    tensors: TensorNorms | None = None
    other_damaged: str | None = None
    """In what way the checkpoint that it was compared with is."""


Line = Progress | Finding
Owned = list[tuple[fmt.Piece, fmt.Tensor | None]]
"""Pieces and the tensors that they are of; None: the header."""


def reread(
    store: Store,
    job: str,
    checkpoint: str,
    against: str | None = None,
    *,
    pace: Pace = lambda _: None,
    told: Callable[[int, int], None] = lambda *_: None,
) -> Finding:
    """Read a checkpoint from where it is kept, compare every byte with its digests, and sum its tensors up.

    Args:
        store: where it is.
        job: whose it is.
        checkpoint: its id.
        against: another one, that is read along to tell how far the tensors are from each other.
        pace: called before so many bytes are read, and may wait.
        told: called with the bytes read so far and those to be read.
    """
    reading = _Reading(store, job, checkpoint, against, pace, told)
    try:
        reading.run()
    except DamagedCheckpoint as error:
        if checkpoint not in store.checkpoints(job):
            return reading.finding("gone", "it was removed from the store meanwhile")
        return reading.finding("damaged", str(error))
    except (HoldfastError, OSError, MemoryError) as error:
        return reading.finding("failed", str(error) or type(error).__name__)
    return reading.finding("sound")


class _Reading:
    """One use of `reread`."""

    def __init__(
        self,
        store: Store,
        job: str,
        checkpoint: str,
        against: str | None,
        pace: Pace,
        told: Callable[[int, int], None],
    ) -> None:
        self._store, self._job, self._checkpoint, self._against = store, job, checkpoint, against
        self._pace, self._told = pace, told
        self._read_bytes = self._total_bytes = 0
        self._other: _Other | None = None
        self._other_damaged: str | None = None
        self._norms: TensorNorms | None = None

    def finding(self, verdict: Verdict, reason: str | None = None) -> Finding:
        return Finding(
            verdict=verdict,
            reason=reason,
            read_bytes=self._read_bytes,
            total_bytes=self._total_bytes,
            tensors=self._norms,
            other_damaged=self._other_damaged,
        )

    def run(self) -> None:
        found = restore.manifest(self._store, self._job, self._checkpoint)
        self._total_bytes = sum(file.size_bytes for file in found.files)
        try:
            if self._against is not None:
                self._other = _Other(self._store, self._job, self._against)
                self._total_bytes *= 2
        except (HoldfastError, OSError) as error:
            self._give_up_other(error)
        norms = Norms(compared=self._other is not None)
        try:
            for file in found.files:
                self._read_file(found, file, norms)
        finally:
            if self._other is not None:
                self._other.close()
        self._norms = norms.told()

    def _read_file(self, found: fmt.Manifest, file: fmt.File, norms: Norms) -> None:
        owners = _owners(found, file)
        with self._store.open_file(self._job, self._checkpoint, file.name, from_disk=True) as source:
            fmt.check_size(file, source.size_bytes)
            for run in runs_to_verify(found, file, STRETCH_BYTES):
                self._read(source, run)
                owned = [(piece, next(owners)) for piece in run.pieces]
                other = self._counterparts(owned)
                for piece, tensor in owned:
                    if tensor is not None:
                        norms.add(tensor, run.view(piece.start, piece.end), other.get(piece.start))
                run.memory = None

    def _counterparts(self, owned: Owned) -> dict[int, memoryview]:
        """What the other checkpoint has in the place of pieces, by where these start."""
        try:
            return self._other.counterparts(owned, self._read) if self._other is not None else {}
        except (HoldfastError, OSError) as error:
            self._give_up_other(error)
            return {}

    def _give_up_other(self, error: Exception) -> None:
        """The verdict is about one checkpoint: whatever is wrong with the other does not change it."""
        if self._other is not None:
            self._other.close()
        self._other = None
        self._other_damaged = str(error)

    def _read(self, source: FileReader, run: Run) -> None:
        self._pace(run.end - run.base)
        run.reserve()
        source.read_into(run.base, run.view(run.base, run.end))
        for piece in run.pieces:
            fmt.check_digest(run.file, piece, fmt.digest(run.view(piece.start, piece.end)))
        self._read_bytes = min(self._read_bytes + run.end - run.base, self._total_bytes)
        self._told(self._read_bytes, self._total_bytes)


class _Other:
    """The checkpoint that one is compared with, read beside it."""

    def __init__(self, store: Store, job: str, checkpoint: str) -> None:
        self._store, self._job, self._checkpoint = store, job, checkpoint
        manifest = restore.manifest(store, job, checkpoint)
        self._files = {file.name: file for file in manifest.files}
        self._tensors = {_identity(tensor): tensor for tensor in manifest.tensors}
        self._opened: tuple[str, FileReader] | None = None

    def counterparts(self, owned: Owned, read: Callable[[FileReader, Run], None]) -> dict[int, memoryview]:
        """The bytes of the same pieces of the same tensors here, by where the pieces asked for start."""
        wanted: dict[str, dict[fmt.Piece, int]] = {}
        for piece, tensor in owned:
            there = self._tensors.get(_identity(tensor)) if tensor is not None else None
            if tensor is not None and there is not None and piece.start < piece.end:
                number = (piece.start - tensor.start) // fmt.CHUNK_BYTES
                same = next(itertools.islice(fmt.pieces_of(there), number, None))
                wanted.setdefault(there.file, {})[same] = piece.start
        found: dict[int, memoryview] = {}
        for file, starts in wanted.items():
            for pieces in near(sorted(starts, key=lambda piece: piece.start)):
                run = Run(self._files[file], pieces)
                read(self._source(file), run)
                found |= {starts[piece]: run.view(piece.start, piece.end) for piece in pieces}
        return found

    def _source(self, file: str) -> FileReader:
        if self._opened is None or self._opened[0] != file:
            self.close()
            self._opened = file, self._store.open_file(self._job, self._checkpoint, file, from_disk=True)
        return self._opened[1]

    def close(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            opened[1].close()


def _identity(tensor: fmt.Tensor) -> tuple[object, ...]:
    return tensor.name, tensor.rank, tensor.dtype, tensor.shape, tensor.offsets


def _owners(manifest: fmt.Manifest, file: fmt.File) -> Iterator[fmt.Tensor | None]:
    """Of each piece of a file, in its order, the tensor; None: it is the header."""
    yield None
    for tensor in sorted(fmt.tensors_of(manifest, file.name), key=lambda tensor: tensor.start):
        for _ in fmt.pieces_of(tensor):
            yield tensor


@dataclasses.dataclass(slots=True)
class Sums:
    """Of one tensor, over what is finite; and of what another checkpoint has in its place."""

    elements: int = 0
    squares: float = 0.0
    largest: float = 0.0
    nan: int = 0
    inf: int = 0
    other_squares: float = 0.0
    difference_squares: float = 0.0
    comparable: bool = True
    """There is a counterpart to all that was seen of it."""

    def add(self, values: torch.Tensor, other: torch.Tensor | None) -> None:
        """Some elements, in float64, and their counterparts."""
        finite = values.isfinite()
        self.elements += values.numel()
        if not bool(finite.all()):
            self.nan += int(values.isnan().sum())
            self.inf += int(values.isinf().sum())
        here = values[finite]
        self.squares += _squares(here)
        self.largest = max(self.largest, here.abs().max().item() if here.numel() else 0.0)
        self.comparable &= other is not None
        if other is not None:
            self.other_squares += _squares(other[other.isfinite()])
            both = finite & other.isfinite()
            self.difference_squares += _squares(values[both] - other[both])


class Norms:
    """Collects the sums of a checkpoint's tensors."""

    def __init__(self, *, compared: bool) -> None:
        self._compared = compared
        self._sums: dict[str, Sums] = {}

    def add(self, tensor: fmt.Tensor, data: memoryview, other: memoryview | None) -> None:
        """Bytes of a tensor, or of a shard of it, and those in their place in the other checkpoint.

        Of a tensor that holds no floating-point numbers nothing is told.
        """
        dtype = DTYPES[tensor.dtype]
        if not (dtype.is_floating_point or dtype.is_complex):
            return
        name = tensor.name if tensor.rank is None else f"{tensor.name} [rank {tensor.rank}]"
        sums = self._sums.setdefault(name, Sums())
        if len(data):
            sums.add(_values(data, dtype), None if other is None else _values(other, dtype))

    def told(self) -> TensorNorms:
        """Where there are too many: first those that hold what is not finite, then the largest."""
        by_weight = sorted(
            self._sums, key=lambda name: (self._sums[name].nan + self._sums[name].inf, self._sums[name].elements)
        )
        kept = set(by_weight[-MOST_TENSORS:])
        names = [name for name in self._sums if name in kept]
        rows = [self._sums[name] for name in names]
        return TensorNorms(
            name=names,
            elements=[each.elements for each in rows],
            norm=[math.sqrt(each.squares) for each in rows],
            largest=[each.largest for each in rows],
            nan=[each.nan for each in rows],
            inf=[each.inf for each in rows],
            other_norm=[_if(each, each.other_squares) for each in rows] if self._compared else [],
            distance=[_if(each, each.difference_squares) for each in rows] if self._compared else [],
            left_out=len(self._sums) - len(names),
        )


def _values(data: memoryview, dtype: torch.dtype) -> torch.Tensor:
    stored = torch.frombuffer(data, dtype=dtype)
    parts = torch.view_as_real(stored).flatten() if dtype.is_complex else stored
    return parts.to(torch.float64)


def _squares(values: torch.Tensor) -> float:
    return torch.dot(values, values).item()


def _if(sums: Sums, squares: float) -> float:
    return math.sqrt(squares) if sums.comparable else math.nan


def main(opener: str, url: str, job: str, checkpoint: str, bytes_per_second: str, against: str = "") -> None:
    lower_cpu_priority()
    raise_oom_score()
    torch.set_num_threads(1)
    open_store: Callable[[str], Store] = pkgutil.resolve_name(opener)
    told_at = 0.0

    def told(read_bytes: int, total_bytes: int) -> None:
        nonlocal told_at
        if time.monotonic() - told_at >= TOLD_EVERY_SECONDS:
            told_at = time.monotonic()
            _say(Progress(read_bytes, total_bytes))

    pace = RateLimiter(float(bytes_per_second), threading.Event().wait)
    _say(reread(open_store(url), job, checkpoint, against or None, pace=pace, told=told))


def _say(line: Line) -> None:
    try:
        print(msgspec.json.encode(line).decode(), flush=True)
    except BrokenPipeError:  # whoever wanted to know is gone, and so nobody reads on
        os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
