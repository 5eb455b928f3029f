"""Parallel reading of a checkpoint's files into fresh memory, verified on the way. Knows no torch.

A file is read as runs: stretches with memory of their own, which lives as long as somebody looks at it. Threads
read a run in large blocks, aligned for direct I/O, and whichever of them finds the next bytes complete feeds
them to the digest while they are still in a cache.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import mmap
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from holdfast import format as fmt
from holdfast.store import Store
from holdfast.store.base import FileReader

READ_BYTES = 8 << 20
WINDOW_BYTES = 64 << 20
"""Memory for each stretch that is read to be verified only; about as many are held as there are threads."""
SMALL_FILE_BYTES = 1 << 20
"""A file of at most this is read at once."""
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
        self.memory: mmap.mmap | None = None

    def reserve(self) -> mmap.mmap:
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
    """The header and the tensors of a file; or `only` the tensors of these names.

    What is kept together lies together: the memory of a module's tensors goes once they are copied, while an
    optimizer goes on with its own as they are. Small tensors, which are always copied, lie with the header; in
    a small file all do.
    """
    tensors = sorted(fmt.tensors_of(manifest, file.name), key=lambda tensor: tensor.start)
    groups = [list(group) for _, group in itertools.groupby(tensors, key=lambda each: _kept_with(file, each))]
    if only is not None:
        groups = [[tensor for tensor in group if tensor.name in only] for group in groups]
        return [Run(file, list(_pieces(group)), group) for group in groups if group]
    header = next(fmt.pieces(manifest, file))
    beside = groups.pop(0) if groups and not _kept_with(file, tensors[0]) else []
    first = Run(file, [header, *_pieces(beside)], beside)
    return [first, *(Run(file, list(_pieces(group)), group) for group in groups)]


def _pieces(tensors: Iterable[fmt.Tensor]) -> Iterator[fmt.Piece]:
    return (piece for tensor in tensors for piece in fmt.pieces_of(tensor))


def _kept_with(file: fmt.File, tensor: fmt.Tensor) -> str:
    is_large = file.size_bytes > SMALL_FILE_BYTES and tensor.end - tensor.start >= fmt.SMALL_BYTES
    return object_of(tensor) if is_large else ""


def runs_to_verify(manifest: fmt.Manifest, file: fmt.File) -> Iterator[Run]:
    """All of a file in stretches of moderate size."""
    pieces: list[fmt.Piece] = []
    for piece in fmt.pieces(manifest, file):
        if pieces and piece.end - pieces[0].start > WINDOW_BYTES:
            yield Run(file, pieces)
            pieces = []
        pieces.append(piece)
    yield Run(file, pieces)


def object_of(tensor: fmt.Tensor) -> str:
    """The keyword of the object that a tensor belongs to."""
    return tensor.name.partition(".")[0]


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
    store: Store, job: str, checkpoint: str, manifest: fmt.Manifest, name: str
) -> list[tuple[fmt.Tensor, memoryview]]:
    """A tensor's shards and their bytes, reading nothing else. KeyError for no such name; else as `read`."""
    files = {file.name: file for file in manifest.files}
    runs = [
        Run(files[tensor.file], list(fmt.pieces_of(tensor)), [tensor])
        for tensor in manifest.tensors
        if tensor.name == name
    ]
    if not runs:
        raise KeyError(name)
    read(store, job, checkpoint, manifest, runs)
    return [(tensor, run.view(tensor.start, tensor.end)) for run in runs for tensor in run.tensors]


class _Reading:
    """One use of `read`: what is left to do, shared by the threads that do it."""

    def __init__(
        self, store: Store, job: str, checkpoint: str, manifest: fmt.Manifest, runs: list[Run], keep: bool
    ) -> None:
        self._threads, self._keep = store.readers, keep
        for run in runs if keep else ():
            run.reserve()  # all of it here: `meanwhile` may look at it while threads read
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
                fmt.check_layout(manifest, file, opened.size_bytes)
                undo.pop_all()
                return opened

        self._sources = {run.file.name: _Source(run.file, open_file, left[run.file.name]) for run in runs}
        self._lock = threading.Lock()
        self._failure: BaseException | None = None

    def run(self, progress: Progress | None, meanwhile: Callable[[], None]) -> None:
        try:
            if self._count > 1:
                self._run_threads(progress, meanwhile)
            else:
                self._work()
                meanwhile()
        finally:
            for source in self._sources.values():
                source.close()
        if self._failure is not None:
            raise self._failure
        assert all(verifier.whole for verifier in self._verifiers.values())

    def _run_threads(self, progress: Progress | None, meanwhile: Callable[[], None]) -> None:
        threads = [
            threading.Thread(target=self._work, name=f"holdfast-read-{number}", daemon=True)
            for number in range(min(self._threads, self._count))
        ]
        try:
            for thread in threads:
                thread.start()
            meanwhile()
            for thread in threads:
                self._watch(thread, progress)
        except BaseException as error:  # Ctrl-C as a rule: the threads stop at their next block
            self._fail(error)
            for thread in filter(threading.Thread.is_alive, threads):
                thread.join()
            raise

    def _watch(self, thread: threading.Thread, progress: Progress | None) -> None:
        if progress is None:
            thread.join()
            return
        while thread.is_alive():
            thread.join(TOLD_EVERY_SECONDS)
            progress(self._done_bytes, self._total_bytes)

    def _work(self) -> None:
        try:
            while (block := self._next()) is not None:
                self._read(*block)
        except BaseException as error:  # a thread's edge: `run` raises it where somebody can act on it
            self._fail(error)

    def _next(self) -> tuple[Run, int, int] | None:
        with self._lock:
            block = None if self._failure else next(self._blocks, None)
            if block is not None:
                block[0].reserve()
            return block

    def _read(self, run: Run, start: int, end: int) -> None:
        self._sources[run.file.name].read_into(start, run.view(start, end))
        verifier = self._verifiers[id(run)]
        verifier.arrived(start, end)
        if verifier.whole and not self._keep:
            run.memory = None
        with self._lock:
            self._done_bytes += end - start

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


def fresh_memory(size_bytes: int) -> mmap.mmap:
    """Zeroed memory of this process alone, from the start of a page, in large pages where there are some."""
    try:
        memory = mmap.mmap(-1, max(1, size_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no memory for {size_bytes / 1e6:,.0f} MB of a checkpoint: {error.strerror}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
