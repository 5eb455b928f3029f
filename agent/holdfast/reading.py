"""Parallel reading of a checkpoint's files into fresh memory, verified on the way. Knows no torch.

Threads read each run in large blocks, aligned for direct I/O, and whichever of them finds the next bytes complete
feeds them to the digest while they are still in a cache.
"""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Callable, Iterable

from holdfast import format as fmt
from holdfast.runs import Run
from holdfast.store import Store
from holdfast.store.base import FileReader

TOLD_EVERY_SECONDS = 0.1

Progress = Callable[[int, int], None]
"""Told the bytes read so far and those to be read, on the thread that waits for them."""


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
            threads = _started(threads)
            if not threads:
                self._work()
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


def _started(threads: list[threading.Thread]) -> list[threading.Thread]:
    """As many of them as there may be: fewer do it all."""
    for number, thread in enumerate(threads):
        try:
            thread.start()
        except RuntimeError:
            return threads[:number]
    return threads


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
