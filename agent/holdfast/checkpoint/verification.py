"""Verify a stored checkpoint at a limited rate, in a separate process.

    python -m holdfast.checkpoint.verification URL JOB CHECKPOINT BYTES_PER_SECOND [AGAINST]

The process shares no interpreter lock, torch threads or memory with training. It prints progress and the result as
lines of JSON, and exits when the process that started it has gone.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import sys
import time
from collections.abc import Callable

import msgspec
import torch

from holdfast.checkpoint import reading, restore
from holdfast.checkpoint.degraded import describe_degraded
from holdfast.checkpoint.reading import FileRange, RateLimiter
from holdfast.errors import DamagedCheckpoint, HoldfastError
from holdfast.format import manifest as fmt
from holdfast.format.dtypes import DTYPES
from holdfast.protocol.wire import MAX_REPORTED_TENSORS, TensorNorms, Verdict
from holdfast.store import Store, open_store
from holdfast.store.base import FileReader, Pace
from holdfast.system.io_pool import lower_cpu_priority
from holdfast.system.processes import raise_oom_score

PROGRESS_SECONDS = 1.0


class VerifyProgress(msgspec.Struct, frozen=True, tag="progress"):
    read_bytes: int
    total_bytes: int


class VerifyResult(msgspec.Struct, frozen=True, kw_only=True, tag="finding"):
    verdict: Verdict
    reason: str | None = None
    read_bytes: int = 0
    total_bytes: int = 0
    tensors: TensorNorms | None = None
    other_damaged: str | None = None
    """Reason why the checkpoint to compare with could not be read."""


VerifyMessage = VerifyProgress | VerifyResult


def reread(
    store: Store,
    job: str,
    checkpoint: str,
    against: str | None = None,
    *,
    pace: Pace = lambda _: None,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> VerifyResult:
    """Verify every byte of a checkpoint on its storage device, and compute the norms of its tensors.

    Args:
        against: another checkpoint of the job, to compute how far the tensors are from those in it.
        pace: called with a number of bytes before they are read, and may wait.
        progress: called with the bytes of the checkpoint read so far and the total.
    """
    done = 0, 0
    other = _OtherCheckpoint(store, job, against, pace) if against is not None else None
    norms = Norms(other)

    def advance(*now: int) -> None:
        nonlocal done
        done = now[0], now[1]
        progress(*done)

    def finding(verdict: Verdict, reason: str | None = None) -> VerifyResult:
        return VerifyResult(
            verdict=verdict,
            reason=reason,
            read_bytes=done[0],
            total_bytes=done[1],
            tensors=norms.result() if verdict == "sound" else None,
            other_damaged=other.failure if other is not None else None,
        )

    try:
        restore.verify(store, job, checkpoint, threads=1, pace=pace, sink=norms.add, progress=advance)
    except DamagedCheckpoint as error:
        if checkpoint not in store.checkpoints(job):
            return finding("gone", "it was removed from the store meanwhile")
        return finding("damaged", f"{error}{_way_out(store, job, checkpoint, pace)}")
    except (HoldfastError, OSError, MemoryError) as error:
        return finding("failed", str(error) or type(error).__name__)
    finally:
        if other is not None:
            other.close()
    return finding("sound")


def _way_out(store: Store, job: str, checkpoint: str, pace: Pace) -> str:
    """Name what a degraded restore of a damaged checkpoint would replace."""
    try:
        loss = describe_degraded(store, job, restore.manifest(store, job, checkpoint), pace=pace)
    except (HoldfastError, OSError, MemoryError):
        return ""
    return "" if loss is None else f". A degraded restore would replace {loss}"


class _OtherCheckpoint:
    """The checkpoint to compare with. Damage to it does not change the verdict on the verified one."""

    def __init__(self, store: Store, job: str, checkpoint: str, pace: Pace) -> None:
        self._store, self._job, self._checkpoint, self._pace = store, job, checkpoint, pace
        self._readers: dict[str, _OpenReader] = {}
        self.failure: str | None = None
        try:
            self._manifest = restore.manifest(store, job, checkpoint)
        except (HoldfastError, OSError) as error:
            self.failure = str(error)
            return
        self._files = {file.name: file for file in self._manifest.files}
        self._tensors = {_identity(tensor): tensor for tensor in self._manifest.tensors}

    def counterparts(self, found: FileRange) -> dict[int, memoryview]:
        """Return the bytes of the same ranges of the same tensors, by the start of each range in `found`.

        A range with the same digest in both checkpoints has the same bytes, so only the others are read.
        """
        bytes_at: dict[int, memoryview] = {}
        pairs: dict[str, list[tuple[fmt.DigestRange, int]]] = {}
        for each in found.digests if self.failure is None else ():
            there = self._tensors.get(_identity(each.tensor)) if each.tensor is not None else None
            if each.tensor is not None and there is not None and each.start < each.end:
                number = (each.start - each.tensor.start) // fmt.CHUNK_BYTES
                same = next(itertools.islice(fmt.tensor_ranges(there), number, None))
                if same.digest == each.digest:
                    bytes_at[each.start] = found.view(each.start, each.end)
                else:
                    pairs.setdefault(there.file, []).append((same, each.start))
        for name, matches in pairs.items():
            starts = {same.start: start for same, start in matches}
            ordered = sorted((same for same, _ in matches), key=lambda same: same.start)
            ranges = [FileRange(self._files[name], nearby) for nearby in reading.merge_nearby(ordered)]
            try:
                reading.read(
                    *(self._store, self._job, self._checkpoint, ranges),
                    open_file=self._open, threads=1, pace=self._pace,
                )  # fmt: skip
            except (HoldfastError, OSError) as error:
                self.failure = str(error)
                return {}
            bytes_at |= {
                starts[same.start]: each.view(same.start, same.end) for each in ranges for same in each.digests
            }
        return bytes_at

    def _open(self, file: fmt.File) -> FileReader:
        if file.name not in self._readers:
            opened = reading.open_whole(self._store, self._job, self._checkpoint, file, from_disk=False)
            self._readers[file.name] = _OpenReader(opened)
        return self._readers[file.name]

    def close(self) -> None:
        for each in self._readers.values():
            each.reader.close()


class _OpenReader(FileReader):
    """A reader that stays open over many calls of `reading.read`: an object store looks up a file to open it."""

    def __init__(self, reader: FileReader) -> None:
        self.reader, self.size_bytes = reader, reader.size_bytes

    def read_into(self, start: int, target: memoryview) -> None:
        self.reader.read_into(start, target)


def _identity(tensor: fmt.Tensor) -> tuple[object, ...]:
    return tensor.name, tensor.rank, tensor.dtype, tensor.shape, tensor.offsets


@dataclasses.dataclass(slots=True)
class Sums:
    """Sums over the finite elements of one tensor, and over its counterpart in another checkpoint."""

    elements: int = 0
    squares: float = 0.0
    largest: float = 0.0
    nan: int = 0
    inf: int = 0
    other_squares: float = 0.0
    difference_squares: float = 0.0
    comparable: bool = True
    """Every element so far has a counterpart."""

    def add(self, values: torch.Tensor, other: torch.Tensor | None) -> None:
        """Add elements, in float64, and their counterparts."""
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
    """The sums of a checkpoint's floating-point tensors."""

    def __init__(self, other: _OtherCheckpoint | None) -> None:
        self._other = other if other is not None and other.failure is None else None
        self._sums: dict[str, Sums] = {}

    def add(self, found: FileRange) -> None:
        """Add the bytes of a range of a file, and their counterparts in the other checkpoint."""
        others = self._other.counterparts(found) if self._other is not None else {}
        for each in found.digests:
            if each.tensor is not None:
                self._add(each.tensor, found.view(each.start, each.end), others.get(each.start))

    def _add(self, tensor: fmt.Tensor, data: memoryview, other: memoryview | None) -> None:
        dtype = DTYPES[tensor.dtype]
        if not (dtype.is_floating_point or dtype.is_complex):
            return
        name = tensor.name if tensor.rank is None else f"{tensor.name} [rank {tensor.rank}]"
        sums = self._sums.setdefault(name, Sums())
        if len(data):
            sums.add(_values(data, dtype), None if other is None else _values(other, dtype))

    def result(self) -> TensorNorms:
        """Return at most MAX_REPORTED_TENSORS: those with NaN or infinity first, then the largest."""
        by_weight = sorted(
            self._sums, key=lambda name: (self._sums[name].nan + self._sums[name].inf, self._sums[name].elements)
        )
        kept = set(by_weight[-MAX_REPORTED_TENSORS:])
        names = [name for name in self._sums if name in kept]
        rows = [self._sums[name] for name in names]
        return TensorNorms(
            name=names,
            elements=[each.elements for each in rows],
            norm=[math.sqrt(each.squares) for each in rows],
            largest=[each.largest for each in rows],
            nan=[each.nan for each in rows],
            inf=[each.inf for each in rows],
            other_norm=[_norm(each, each.other_squares) for each in rows] if self._other else [],
            distance=[_norm(each, each.difference_squares) for each in rows] if self._other else [],
            left_out=len(self._sums) - len(names),
        )


def _values(data: memoryview, dtype: torch.dtype) -> torch.Tensor:
    stored = torch.frombuffer(data, dtype=dtype)
    parts = torch.view_as_real(stored).flatten() if dtype.is_complex else stored
    return parts.to(torch.float64)


def _squares(values: torch.Tensor) -> float:
    return torch.dot(values, values).item()


def _norm(sums: Sums, squares: float) -> float:
    return math.sqrt(squares) if sums.comparable else math.nan


def main(url: str, job: str, checkpoint: str, bytes_per_second: str, against: str = "") -> None:
    lower_cpu_priority()
    raise_oom_score()
    torch.set_num_threads(1)
    reported_at = 0.0

    def report(read_bytes: int, total_bytes: int) -> None:
        nonlocal reported_at
        if time.monotonic() - reported_at >= PROGRESS_SECONDS:
            reported_at = time.monotonic()
            _print(VerifyProgress(read_bytes, total_bytes))

    pace = RateLimiter(float(bytes_per_second))
    _print(reread(open_store(url), job, checkpoint, against or None, pace=pace, progress=report))


def _print(line: VerifyMessage) -> None:
    try:
        print(msgspec.json.encode(line).decode(), flush=True)
    except BrokenPipeError:  # the process that started this one has gone
        os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
