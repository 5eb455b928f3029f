"""Stretches of a checkpoint's files, and parallel reading of them into fresh memory, verified on the way.

Knows no torch. Threads read each run in large blocks, aligned for direct I/O, and whichever of them finds the next
bytes complete feeds them to the digest while they are still in a cache.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import mmap
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import wait
from typing import TypeVar

from holdfast.format import manifest as fmt
from holdfast.store import Store
from holdfast.store.base import FileReader
from holdfast.system import io_pool

S = TypeVar("S", fmt.Piece, fmt.Tensor)

READ_BYTES = 8 << 20
WINDOW_BYTES = 64 << 20
"""Memory for each stretch that is read to be verified only; about as many are held as there are threads."""
SMALL_FILE_BYTES = 1 << 20
"""A file of at most this is read at once."""
BRIDGED_BYTES = 64 << 10
"""A stretch that nobody wants is read along up to this length: another read takes longer."""

TOLD_EVERY_SECONDS = 0.1

Progress = Callable[[int, int], None]
"""Told the bytes read so far and those to be read, on the thread that waits for them."""


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
        together = [tensors for group in groups for tensors in near(group)]
        return [Run(file, list(_pieces(tensors)), tensors) for tensors in together]
    header = next(fmt.pieces(manifest, file))
    beside = groups.pop(0) if groups and not _kept_with(file, tensors[0]) else []
    first = Run(file, [header, *_pieces(beside)], beside)
    return [first, *(Run(file, list(_pieces(group)), group) for group in groups)]


def _pieces(tensors: Iterable[fmt.Tensor]) -> Iterator[fmt.Piece]:
    return (piece for tensor in tensors for piece in fmt.pieces_of(tensor))


def near(items: Sequence[S]) -> Iterator[list[S]]:
    """Those that lie so near to each other in their file that they are read together."""
    found: list[S] = []
    for item in items:
        if found and item.start - found[-1].end > BRIDGED_BYTES:
            yield found
            found = []
        found.append(item)
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


def read(
    store: Store,
    job: str,
    checkpoint: str,
    manifest: fmt.Manifest,
    runs: Iterable[Run],
    *,
    keep: bool = True,
    progress: Progress | None = None,
    meanwhile: Callable[[], None] = lambda: None,
) -> None:
    """Read and verify all of `runs`.

    Without `keep` they are verified only: from where they are kept, whatever this machine has in a cache, and
    their memory goes again.

    `meanwhile` is called while threads read: time for what needs no byte of it yet.

    Raises:
        DamagedCheckpoint: names the file and the piece that is not what it was.
        OSError: the store cannot be read, which says nothing about the checkpoint.
        MemoryError: there is no room for it.
    """
    _Reading(store, job, checkpoint, manifest, list(runs), keep).run(progress, meanwhile)


def read_tensor(
    store: Store, job: str, checkpoint: str, manifest: fmt.Manifest, name: str, rank: int = 0
) -> list[tuple[fmt.Tensor, memoryview]]:
    """A tensor's shards and their bytes, as a rank sees them, reading nothing else.

    KeyError for no such name; else as `read`.
    """
    files = {file.name: file for file in manifest.files}
    shards = fmt.tensors_for(manifest, rank)[name]
    runs = [Run(files[shard.file], list(fmt.pieces_of(shard)), [shard]) for shard in shards]
    read(store, job, checkpoint, manifest, runs)
    return [(tensor, run.view(tensor.start, tensor.end)) for run in runs for tensor in run.tensors]


class _Reading:
    """One use of `read`: what is left to do, shared by the threads that do it."""

    def __init__(
        self, store: Store, job: str, checkpoint: str, manifest: fmt.Manifest, runs: list[Run], keep: bool
    ) -> None:
        self._threads, self._keep = store.readers, keep
        blocks = [(run, start, end) for run in runs for start, end in run.blocks()]
        self._blocks = iter(blocks)
        self._count = len(blocks)
        self._total_bytes = sum(run.end - run.base for run in runs)
        self._done_bytes = 0
        self._verifiers = {id(run): _Verifier(run) for run in runs}
        left = collections.Counter(run.file.name for run, _, _ in blocks)

        def open_file(file: fmt.File) -> FileReader:
            with contextlib.ExitStack() as undo:
                opened = undo.enter_context(store.open_file(job, checkpoint, file.name, from_disk=not keep))
                fmt.check_size(file, opened.size_bytes)
                undo.pop_all()
                return opened

        self._sources = {run.file.name: _Source(run.file, open_file, left[run.file.name]) for run in runs}
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        try:
            for run in runs if keep else ():
                run.reserve()  # all of it here: `meanwhile` may look at it while threads read
        except MemoryError:
            for file in {run.file.name: run.file for run in runs}.values():
                open_file(file).close()  # DamagedCheckpoint where a file is not as large as its manifest says
            raise

    def run(self, progress: Progress | None, meanwhile: Callable[[], None]) -> None:
        helpers = [io_pool.submit(self._work) for _ in range(min(self._threads, self._count) - 1)]

        def tell() -> None:
            if progress is not None:
                progress(self._done_bytes, self._total_bytes)

        try:
            meanwhile()
            while self._read_next():
                tell()
            helpers = [helper for helper in helpers if not helper.cancel()]
            while wait(helpers, TOLD_EVERY_SECONDS).not_done:
                tell()
        except BaseException as error:  # also Ctrl-C: the helpers stop before their next block
            self._fail(error)
            wait([helper for helper in helpers if not helper.cancel()])
        finally:
            for source in self._sources.values():
                source.close()
        if self._failure is not None:
            raise self._failure
        assert all(verifier.whole for verifier in self._verifiers.values())

    def _work(self) -> None:
        try:
            while self._read_next():
                pass
        except BaseException as error:  # `run` raises it where somebody can act on it
            self._fail(error)

    def _read_next(self) -> bool:
        """Read and verify a block; False when there is none left."""
        with self._lock:
            block = None if self._failure else next(self._blocks, None)
            if block is None:
                return False
            block[0].reserve()
        run, start, end = block
        self._sources[run.file.name].read_into(start, run.view(start, end))
        verifier = self._verifiers[id(run)]
        verifier.arrived(start, end)
        if verifier.whole and not self._keep:
            run.memory = None
        with self._lock:
            self._done_bytes += end - start
        return True

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._failure = self._failure or error


class _Source:
    """A file, open from its first block to its last: a checkpoint may have more files than a process may open."""

    def __init__(self, file: fmt.File, open_file: Callable[[fmt.File], FileReader], blocks: int) -> None:
        self._file, self._open, self._left = file, open_file, blocks
        self._reader: FileReader | None = None
        self._lock = threading.Lock()

    def read_into(self, start: int, target: memoryview) -> None:
        with self._lock:
            if self._reader is None:
                self._reader = self._open(self._file)
            reader = self._reader
        reader.read_into(start, target)
        with self._lock:
            self._left -= 1
        if not self._left:
            self.close()

    def close(self) -> None:
        with self._lock:
            reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()


class _Verifier:
    """Feeds a run's bytes to its digests in their order, as far as they are here."""

    def __init__(self, run: Run) -> None:
        self._run, self._left = run, collections.deque(run.pieces)
        self._hash, self._at = fmt.hasher(), run.base
        self._here = run.base
        """All before this byte has arrived."""
        self._ahead: dict[int, int] = {}
        """Blocks that arrived before one in front of them."""
        self._busy = False
        self._lock = threading.Lock()

    @property
    def whole(self) -> bool:
        return not self._left

    def arrived(self, start: int, end: int) -> None:
        """A block is here: verify what there is by now, unless another thread is at it and will see it."""
        with self._lock:
            self._ahead[start] = end
            while self._here in self._ahead:
                self._here = self._ahead.pop(self._here)
            if self._busy:
                return
            self._busy, here = True, self._here
        while True:
            self._verify_to(here)
            with self._lock:
                if here == self._here:
                    self._busy = False
                    return
                here = self._here

    def _verify_to(self, here: int) -> None:
        while self._left:
            piece = self._left[0]
            start, end = max(self._at, piece.start), min(here, piece.end)
            if start < end:
                self._hash.update(self._run.view(start, end))
                self._at = end
            if piece.end > here:
                return
            fmt.check_digest(self._run.file, piece, self._hash.hexdigest())
            self._hash.reset()
            self._left.popleft()
