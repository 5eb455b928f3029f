"""Read ranges of a checkpoint's files in parallel, and verify every byte. Does not import torch.

Threads read large blocks, aligned for direct I/O. The thread that completes the next bytes of a range hashes them
while they are in the CPU cache.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import itertools
import mmap
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import wait
from typing import TypeVar

import msgspec

from holdfast.errors import DamagedCheckpoint
from holdfast.format import manifest as fmt
from holdfast.store import Store
from holdfast.store.base import FileReader, Pace
from holdfast.system import io_pool
from holdfast.system.host_memory import fresh_memory

S = TypeVar("S", fmt.DigestRange, fmt.Tensor)

READ_BYTES = 8 << 20
VERIFY_BYTES = 16 << 20
"""Size of the ranges that are only verified; about one per thread is in memory at a time."""
SMALL_FILE_BYTES = 1 << 20
"""A file of at most this size is read as one range."""
GAP_BYTES = 64 << 10
"""A gap of at most this size is read as well, because a second read would take longer."""
PROGRESS_SECONDS = 0.1
MIN_BYTES_PER_SECOND = 1e6
"""Lowest rate limit, so that every read ends in a reasonable time."""

Progress = Callable[[int, int], None]
"""Called with the bytes read so far and the total, on the thread that waits for them."""


class FileRange:
    """A range of a file, read into separate memory."""

    def __init__(
        self, file: fmt.File, digests: Sequence[fmt.DigestRange], tensors: Sequence[fmt.Tensor] = ()
    ) -> None:
        self.file, self.digests, self.tensors = file, digests, tensors
        unit = fmt.BLOCK_BYTES if file.keeps_positions else 1
        self.start = digests[0].start // unit * unit
        """File offset of the memory: the start of the block with the first byte."""
        self.end = min(-(-digests[-1].end // unit) * unit, file.raw_bytes)
        self.memory: mmap.mmap | memoryview | None = None

    def reserve(self) -> mmap.mmap | memoryview:
        """Return the memory to read the range into. MemoryError when it cannot be allocated."""
        if self.memory is None:
            self.memory = fresh_memory(self.end - self.start)
        return self.memory

    def view(self, start: int, end: int) -> memoryview:
        """Return the bytes of the file from `start` to `end`."""
        assert self.memory is not None
        return memoryview(self.memory)[start - self.start : end - self.start]

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Yield at least one block, so that a range of empty tensors is verified as well."""
        if (encoding := self.file.encoding) is not None and not self.file.keeps_positions:
            yield from self._encoded_blocks(encoding.raw_starts)
            return
        for start in range(self.start, max(self.end, self.start + 1), READ_BYTES):
            yield start, min(start + READ_BYTES, self.end)

    def _encoded_blocks(self, starts: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield whole encoded blocks, several if they are small: a read decodes each block that it touches."""
        at, inner = (
            self.start,
            slice(bisect.bisect_right(starts, self.start), bisect.bisect_left(starts, self.end)),
        )
        for border in starts[inner]:
            if border - at >= READ_BYTES:
                yield at, border
                at = border
        yield at, self.end


def ranges_to_load(
    manifest: fmt.Manifest, file: fmt.File, only: Collection[str] | None = None
) -> Iterator[FileRange]:
    """Yield the header and all tensors of a file, or the tensors named in `only`.

    Each object of the session gets separate ranges: the memory of a module's tensors is freed once they are
    copied, while an optimizer keeps its own. Small tensors, which are always copied, share the range of the
    header; in a small file all tensors do.
    """
    if file.name.endswith(fmt.REGION_SUFFIX):  # read, and verified, with the file that it is laid over
        return
    tensors = sorted(fmt.tensors_of(manifest, file.name), key=lambda tensor: tensor.start)
    groups = [list(group) for _, group in itertools.groupby(tensors, key=lambda each: _memory_owner(file, each))]
    if only is not None:
        for group in groups:
            for nearby in merge_nearby([tensor for tensor in group if tensor.name in only]):
                yield FileRange(file, _digests(nearby), nearby)
        return
    header = next(fmt.digest_ranges(manifest, file))
    small = groups.pop(0) if groups and not _memory_owner(file, tensors[0]) else []
    yield FileRange(file, [header, *_digests(small)], small)
    for group in groups:
        yield FileRange(file, _digests(group), group)


def _digests(tensors: Iterable[fmt.Tensor]) -> list[fmt.DigestRange]:
    return [each for tensor in tensors for each in fmt.tensor_ranges(tensor)]


def _memory_owner(file: fmt.File, tensor: fmt.Tensor) -> str:
    is_large = file.raw_bytes > SMALL_FILE_BYTES and tensor.end - tensor.start >= fmt.SMALL_BYTES
    return object_of(tensor.name) if is_large else ""


def merge_nearby(items: Sequence[S]) -> Iterator[list[S]]:
    """Group items, sorted by their file offset, that are close enough for one read."""
    group: list[S] = []
    for item in items:
        if group and item.start - group[-1].end > GAP_BYTES:
            yield group
            group = []
        group.append(item)
    if group:
        yield group


def assign_buffer(buffer: memoryview, ranges: Iterable[FileRange]) -> None:
    """Assign page-aligned `buffer` to as many ranges as fit; the others allocate memory."""
    at = 0
    for each in ranges:
        size_bytes = each.end - each.start
        if at + size_bytes <= len(buffer):
            each.memory = buffer[at : at + size_bytes]
            at = -(-(at + size_bytes) // fmt.BLOCK_BYTES) * fmt.BLOCK_BYTES


def ranges_to_verify(manifest: fmt.Manifest, file: fmt.File) -> Iterator[FileRange]:
    """Yield a file in ranges of at most VERIFY_BYTES, or of one digest if that covers more."""
    digests: list[fmt.DigestRange] = []
    for each in fmt.digest_ranges(manifest, file):
        if digests and each.end - digests[0].start > VERIFY_BYTES:
            yield FileRange(file, digests)
            digests = []
        digests.append(each)
    yield FileRange(file, digests)


def ranges_to_scrub(manifest: fmt.Manifest, file: fmt.File) -> list[FileRange]:
    """Return the ranges that cover the stored bytes of a file, encoded or not."""
    if file.encoding is None:
        return list(ranges_to_verify(manifest, file))
    stored = msgspec.structs.replace(file, encoding=None)
    blocks = zip(file.encoding.blocks, file.encoding.stored_starts, strict=False)
    covered = (fmt.DigestRange(None, start, start + block.stored_bytes, block.digest) for block, start in blocks)
    return [FileRange(stored, [each]) for each in covered]


def object_of(name: str) -> str:
    """Return the keyword of the object that a tensor belongs to."""
    return name.partition(".")[0]


def read(
    store: Store,
    job: str,
    checkpoint: str,
    ranges: Iterable[FileRange],
    *,
    open_file: Callable[[fmt.File], FileReader] | None = None,
    keep: bool = True,
    threads: int | None = None,
    pace: Pace | None = None,
    sink: Callable[[FileRange], None] | None = None,
    progress: Progress | None = None,
) -> None:
    """Read and verify `ranges`.

    Args:
        open_file: opens a file of the checkpoint; by default in the store, for this call.
        keep: keep the bytes in memory. Otherwise they are read from the storage device, past any cache, and their
            memory is freed.
        threads: the number of threads, including this one; by default that of the store.
        pace: called with a number of bytes before they are read, and may wait.
        sink: called with each range once it is verified, on any of the threads.
        progress: called between blocks.

    Raises:
        DamagedCheckpoint: names the file and the range that differs.
        OSError: the store cannot be read, which says nothing about the checkpoint.
        MemoryError: the memory for the ranges cannot be allocated.
    """

    def open_in_store(file: fmt.File) -> FileReader:
        return open_whole(store, job, checkpoint, file, from_disk=not keep)

    work = _Reading(list(ranges), open_file or open_in_store, keep, pace, sink)
    work.run(threads or store.read_threads, progress)


def open_whole(
    store: Store,
    job: str,
    checkpoint: str,
    file: fmt.File,
    *,
    from_disk: bool,
    open_layer: Callable[[str], FileReader] | None = None,
) -> FileReader:
    """Open a file of a checkpoint, and decode it. DamagedCheckpoint when it is missing or has another size.

    `open_layer` opens the files that are laid over it; by default in the store.
    """

    def open_in_store(name: str) -> FileReader:
        return store.open_file(job, checkpoint, name, from_disk=from_disk)

    with contextlib.ExitStack() as undo:
        opened = undo.enter_context(store.open_file(job, checkpoint, file.name, from_disk=from_disk))
        fmt.check_size(file, opened.size_bytes)
        if file.encoding is not None:
            from holdfast.checkpoint.decoding import decoded  # only for files that are encoded

            opened = decoded(file, opened, open_layer or open_in_store)
        undo.pop_all()
        return opened


class RateLimiter:
    """A `Pace` that limits the average rate of one thread.

    Each request waits until the earlier ones have used up their time at this rate; the first does not wait.
    """

    def __init__(
        self,
        bytes_per_second: float,
        wait: Callable[[float], object] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rate = max(bytes_per_second, MIN_BYTES_PER_SECOND)
        self._wait, self._clock = wait, clock
        self._paid_at = 0.0

    def __call__(self, size_bytes: int, /) -> None:
        now = self._clock()
        begins_at = max(now, self._paid_at)
        self._paid_at = begins_at + size_bytes / self._rate
        if begins_at > now:
            self._wait(begins_at - now)


class _Reading:
    """One call of `read`: the blocks that are left to read, shared by its threads."""

    def __init__(
        self,
        ranges: list[FileRange],
        open_file: Callable[[fmt.File], FileReader],
        keep: bool,
        pace: Pace | None,
        sink: Callable[[FileRange], None] | None,
    ) -> None:
        self._open_file, self._keep, self._pace, self._sink = open_file, keep, pace, sink
        blocks = [(each, *block) for each in ranges for block in each.blocks()]
        self._blocks = iter(blocks)
        self._count = len(blocks)
        self._total_bytes = sum(each.end - each.start for each in ranges)
        self._done_bytes = 0
        self._verifiers = {id(each): _RangeVerifier(each) for each in ranges}
        left = collections.Counter(each.file.name for each, _, _ in blocks)
        self._files = {each.file.name: _SharedFile(each.file, open_file, left[each.file.name]) for each in ranges}
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        try:
            for each in ranges if keep else ():
                each.reserve()  # before threads start: a load that does not fit fails before it reads
        except MemoryError:
            for file in {each.file.name: each.file for each in ranges}.values():
                open_file(file).close()  # DamagedCheckpoint where a file is smaller than its manifest says
            raise

    def run(self, threads: int, progress: Progress | None) -> None:
        helpers = io_pool.submit_helpers(self._work, min(threads, self._count) - 1)

        def report() -> None:
            if progress is not None:
                progress(self._done_bytes, self._total_bytes)

        try:
            report()
            while self._read_next():
                report()
            helpers = [helper for helper in helpers if not helper.cancel()]
            while wait(helpers, PROGRESS_SECONDS).not_done:
                report()
        except BaseException as error:  # also Ctrl-C: the helpers stop before their next block
            self._fail(error)
            wait([helper for helper in helpers if not helper.cancel()])
        finally:
            for file in self._files.values():
                file.close()
        if self._failure is not None:
            raise self._failure
        assert all(verifier.is_done for verifier in self._verifiers.values())

    def _work(self) -> None:
        try:
            while self._read_next():
                pass
        except BaseException as error:  # `run` raises it on the thread that waits
            self._fail(error)

    def _read_next(self) -> bool:
        """Read and verify a block; return False when there is none left."""
        with self._lock:
            block = None if self._failure else next(self._blocks, None)
            if block is None:
                return False
            block[0].reserve()
        found, start, end = block
        if self._pace is not None:
            self._pace(end - start)
        self._files[found.file.name].read_into(start, found.view(start, end))
        try:
            is_complete = self._verifiers[id(found)].completes(start, end)
        except DamagedCheckpoint:
            with self._open_file(found.file) as opened:
                opened.find_damage()
            raise
        if is_complete:
            if self._sink is not None:
                self._sink(found)
            if not self._keep:
                found.memory = None
        with self._lock:
            self._done_bytes += end - start
        return True

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._failure = self._failure or error


class _SharedFile:
    """A file that is open from its first block to its last, since a process may open only so many files."""

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


class _RangeVerifier:
    """Hashes the bytes of a range in order, as far as they have been read."""

    def __init__(self, verified: FileRange) -> None:
        self._range, self._left = verified, collections.deque(verified.digests)
        self._hash, self._at = fmt.hasher(), verified.start
        self._read_to = verified.start
        """All bytes before this offset have been read."""
        self._ahead: dict[int, int] = {}
        """Start and end of blocks that were read before an earlier block."""
        self._busy = False
        self._lock = threading.Lock()

    @property
    def is_done(self) -> bool:
        return not self._left

    def completes(self, start: int, end: int) -> bool:
        """Verify as far as possible now that a block was read; return whether this completed the range.

        Does nothing while another thread verifies, which will see the block.
        """
        with self._lock:
            self._ahead[start] = end
            while self._read_to in self._ahead:
                self._read_to = self._ahead.pop(self._read_to)
            if self._busy:
                return False
            self._busy, target = True, self._read_to
        while True:
            self._verify_to(target)
            with self._lock:
                if target == self._read_to:
                    self._busy = False
                    return self.is_done
                target = self._read_to

    def _verify_to(self, target: int) -> None:
        while self._left:
            covered = self._left[0]
            start, end = max(self._at, covered.start), min(target, covered.end)
            if start < end:
                self._hash.update(self._range.view(start, end))
                self._at = end
            if covered.end > target:
                return
            fmt.check_digest(self._range.file, covered, self._hash.hexdigest())
            self._hash.reset()
            self._left.popleft()
