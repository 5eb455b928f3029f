"""Stretches of a checkpoint's files, and the memory that each is read into. Knows no torch."""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Collection, Iterable, Iterator, Sequence

from holdfast import format as fmt

READ_BYTES = 8 << 20
WINDOW_BYTES = 64 << 20
"""Memory for each stretch that is read to be verified only; about as many are held as there are threads."""
SMALL_FILE_BYTES = 1 << 20
"""A file of at most this is read at once."""
BRIDGED_BYTES = 64 << 10
"""A stretch that nobody wants is read along up to this length: another read takes longer."""


class Run:
    """A stretch of a file, from the first to the last of its pieces, in memory of its own."""

    def __init__(self, file: fmt.File, pieces: Sequence[fmt.Piece], tensors: Sequence[fmt.Tensor] = ()) -> None:
        self.file, self.pieces, self.tensors = file, pieces, tensors
        self.base = pieces[0].start // fmt.BLOCK_BYTES * fmt.BLOCK_BYTES
        """Where the memory begins in the file: at the block that holds the first piece."""
        self.end = min(-(-pieces[-1].end // fmt.BLOCK_BYTES) * fmt.BLOCK_BYTES, file.size_bytes)
        self.memory: mmap.mmap | memoryview | None = None

    def reserve(self) -> mmap.mmap | memoryview:
        """The memory that the run will be read into. MemoryError when there is none."""
        if self.memory is None:
            self.memory = fresh_memory(self.end - self.base)
        return self.memory

    def view(self, start: int, end: int) -> memoryview:
        """The bytes of the file from `start` to `end`."""
        assert self.memory is not None
        return memoryview(self.memory)[start - self.base : end - self.base]

    def blocks(self) -> Iterator[tuple[int, int]]:
        """One at least, so that a run of empty tensors is looked at as well."""
        for start in range(self.base, max(self.end, self.base + 1), READ_BYTES):
            yield start, min(start + READ_BYTES, self.end)


def runs_to_keep(manifest: fmt.Manifest, file: fmt.File, only: Collection[str] | None = None) -> list[Run]:
    """The header and the tensors of a file; or `only` the tensors of these names, reading around the others.

    What is kept together lies together: the memory of a module's tensors goes once they are copied, while an
    optimizer goes on with its own as they are. Small tensors, which are always copied, lie with the header; in
    a small file all do.
    """
    tensors = sorted(fmt.tensors_of(manifest, file.name), key=lambda tensor: tensor.start)
    groups = [list(group) for _, group in itertools.groupby(tensors, key=lambda each: _kept_with(file, each))]
    if only is not None:
        groups = [[tensor for tensor in group if tensor.name in only] for group in groups]
        near = [tensors for group in groups for tensors in _near(group)]
        return [Run(file, list(_pieces(tensors)), tensors) for tensors in near]
    header = next(fmt.pieces(manifest, file))
    beside = groups.pop(0) if groups and not _kept_with(file, tensors[0]) else []
    first = Run(file, [header, *_pieces(beside)], beside)
    return [first, *(Run(file, list(_pieces(group)), group) for group in groups)]


def _pieces(tensors: Iterable[fmt.Tensor]) -> Iterator[fmt.Piece]:
    return (piece for tensor in tensors for piece in fmt.pieces_of(tensor))


def _near(tensors: Sequence[fmt.Tensor]) -> Iterator[list[fmt.Tensor]]:
    """Those that lie so near to each other that they are read together."""
    found: list[fmt.Tensor] = []
    for tensor in tensors:
        if found and tensor.start - found[-1].end > BRIDGED_BYTES:
            yield found
            found = []
        found.append(tensor)
    if found:
        yield found


def _kept_with(file: fmt.File, tensor: fmt.Tensor) -> str:
    is_large = file.size_bytes > SMALL_FILE_BYTES and tensor.end - tensor.start >= fmt.SMALL_BYTES
    return object_of(tensor.name) if is_large else ""


def lay_into(room: memoryview, runs: Iterable[Run]) -> None:
    """Have runs read into memory that is there, which begins with a page, as far as it goes."""
    at = 0
    for run in runs:
        size_bytes = run.end - run.base
        if at + size_bytes <= len(room):
            run.memory = room[at : at + size_bytes]
            at = -(-(at + size_bytes) // fmt.BLOCK_BYTES) * fmt.BLOCK_BYTES


def runs_to_verify(manifest: fmt.Manifest, file: fmt.File, most_bytes: int | None = None) -> Iterator[Run]:
    """All of a file in stretches of moderate size: of at most WINDOW_BYTES, unless a piece of it is larger."""
    most_bytes = WINDOW_BYTES if most_bytes is None else most_bytes
    pieces: list[fmt.Piece] = []
    for piece in fmt.pieces(manifest, file):
        if pieces and piece.end - pieces[0].start > most_bytes:
            yield Run(file, pieces)
            pieces = []
        pieces.append(piece)
    yield Run(file, pieces)


def object_of(name: str) -> str:
    """The keyword of the object that a tensor belongs to."""
    return name.partition(".")[0]


def fresh_memory(size_bytes: int) -> mmap.mmap:
    """Zeroed memory of this process alone, from the start of a page.

    Not in huge pages, though these are quicker to come by as a rule: a virtual machine that hands free memory back
    to its host hands back huge pages first, and must ask for each again. Measured there, all took twice as long.
    """
    try:
        return mmap.mmap(-1, max(1, size_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no memory for {size_bytes / 1e6:,.0f} MB of a checkpoint: {error.strerror}") from error
