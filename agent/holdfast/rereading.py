"""Reads a checkpoint back, slowly and one piece after the other: is it still what was written, and what is in it?

    python -m holdfast.rereading OPENER URL JOB CHECKPOINT BYTES_PER_SECOND [AGAINST]

A process of its own, since training must not share the interpreter lock, the threads of torch or the memory with
it. It tells what it found as lines of JSON, and ends with whoever started it.
"""

from __future__ import annotations

import os
import pkgutil
import sys
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import torch

from holdfast import format as fmt
from holdfast import restore
from holdfast.errors import DamagedCheckpoint, HoldfastError
from holdfast.norms import Norms
from holdfast.persist.courtesy import be_nice, volunteer
from holdfast.persist.pacer import Pacer
from holdfast.protocol import TensorNorms, Verdict
from holdfast.reading import Run, runs_to_verify
from holdfast.store import Store
from holdfast.store.base import FileReader, Pace

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
        if self._against is not None:
            self._begin_other(found)
        norms = Norms(compared=self._other is not None)
        for file in found.files:
            try:
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
                beside = self._beside(run)
                for piece in run.pieces:
                    data, tensor = run.view(piece.start, piece.end), next(owners)
                    fmt.check_digest(file, piece, fmt.digest(data))
                    if tensor is not None:
                        norms.add(tensor, data, beside(tensor, piece))
                run.memory = None

    def _begin_other(self, found: fmt.Manifest) -> None:
        assert self._against is not None
        try:
            self._other = _Other(self._store, self._job, self._against, found)
        except (HoldfastError, OSError) as error:
            self._give_up_other(error)
        else:
            self._total_bytes *= 2

    def _beside(self, run: Run) -> Callable[[fmt.Tensor, fmt.Piece], memoryview | None]:
        """What the other checkpoint has in the place of a piece."""
        if self._other is None:
            return lambda *_: None
        try:
            there = self._other.counterpart(run)
            if there is not None:
                self._read(self._other.source(run.file.name), there)
                self._other.verify(there)
        except (HoldfastError, OSError) as error:
            self._give_up_other(error)
            return lambda *_: None
        other = self._other
        return lambda tensor, piece: None if there is None else other.view(there, tensor, piece)

    def _give_up_other(self, error: Exception) -> None:
        """The verdict is about one checkpoint: whatever is wrong with the other does not change it."""
        self._other = None
        self._other_damaged = str(error)

    def _read(self, source: FileReader, run: Run) -> None:
        self._pace(run.end - run.base)
        run.reserve()
        source.read_into(run.base, run.view(run.base, run.end))
        self._read_bytes = min(self._read_bytes + run.end - run.base, self._total_bytes)
        self._told(self._read_bytes, self._total_bytes)


class _Other:
    """The checkpoint that one is compared with, file by file beside it.

    Checkpoints of a job are laid out alike as long as the script's objects and the number of ranks stay what they
    are: then a tensor lies in the file of the same name, as far behind its header.
    """

    def __init__(self, store: Store, job: str, checkpoint: str, found: fmt.Manifest) -> None:
        self._store, self._job, self._checkpoint = store, job, checkpoint
        other = restore.manifest(store, job, checkpoint)
        self._files = {file.name: file for file in other.files}
        headers = {file.name: file.header_bytes for file in found.files}
        self._shift = {
            name: file.header_bytes - headers[name] for name, file in self._files.items() if name in headers
        }
        self._tensors = {_identity(tensor): tensor for tensor in other.tensors}
        self._owners = {name: list(fmt.tensors_of(found, name)) for name in headers}
        self._open: FileReader | None = None

    def counterpart(self, run: Run) -> Run | None:
        """The stretch of the other file that holds the same tensors; None where there is none."""
        if run.file.name not in self._shift:
            return None
        shift = self._shift[run.file.name]
        first, last = run.pieces[0].start, run.pieces[-1].end
        pieces = [
            piece
            for tensor in self._owners[run.file.name]
            if tensor.end > first and tensor.start < last and (there := self._same(tensor)) is not None
            for piece in fmt.pieces_of(there)
            if piece.start - shift >= first and piece.end - shift <= last and piece.end > piece.start
        ]
        pieces.sort(key=lambda piece: piece.start)
        return Run(self._files[run.file.name], pieces) if pieces else None

    def source(self, file: str) -> FileReader:
        if self._open is None:
            self._open = self._store.open_file(self._job, self._checkpoint, file, from_disk=True)
        return self._open

    def close(self) -> None:
        opened, self._open = self._open, None
        if opened is not None:
            opened.close()

    def verify(self, there: Run) -> None:
        for piece in there.pieces:
            fmt.check_digest(there.file, piece, fmt.digest(there.view(piece.start, piece.end)))

    def view(self, there: Run, tensor: fmt.Tensor, piece: fmt.Piece) -> memoryview | None:
        if self._same(tensor) is None:
            return None
        shift = self._shift[there.file.name]
        return there.view(piece.start + shift, piece.end + shift)

    def _same(self, tensor: fmt.Tensor) -> fmt.Tensor | None:
        there = self._tensors.get(_identity(tensor))
        if there is None or there.file != tensor.file:
            return None
        return there if there.start - tensor.start == self._shift[tensor.file] else None


def _identity(tensor: fmt.Tensor) -> tuple[object, ...]:
    return tensor.name, tensor.rank, tensor.dtype, tensor.shape, tensor.offsets


def _owners(manifest: fmt.Manifest, file: fmt.File) -> Iterator[fmt.Tensor | None]:
    """Of each piece of a file, in its order, the tensor; None: it is the header."""
    yield None
    for tensor in sorted(fmt.tensors_of(manifest, file.name), key=lambda tensor: tensor.start):
        for _ in fmt.pieces_of(tensor):
            yield tensor


def main(opener: str, url: str, job: str, checkpoint: str, bytes_per_second: str, against: str = "") -> None:
    be_nice()
    volunteer()
    torch.set_num_threads(1)
    open_store: Callable[[str], Store] = pkgutil.resolve_name(opener)
    told_at = 0.0

    def told(read_bytes: int, total_bytes: int) -> None:
        nonlocal told_at
        if time.monotonic() - told_at >= TOLD_EVERY_SECONDS:
            told_at = time.monotonic()
            _say(Progress(read_bytes, total_bytes))

    pace = Pacer(float(bytes_per_second), threading.Event().wait)
    _say(reread(open_store(url), job, checkpoint, against or None, pace=pace, told=told))


def _say(line: Line) -> None:
    try:
        print(msgspec.json.encode(line).decode(), flush=True)
    except BrokenPipeError:  # whoever wanted to know is gone, and so nobody reads on
        os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
