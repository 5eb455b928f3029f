"""The completion marker of a snapshot in shared memory: its description, and digests of all its bytes. No torch.

The writer of a checkpoint digests the snapshot anyway. When it has, and long before the checkpoint is durable, it
writes the marker. The marker is removed before the memory is used again, so at any instant there is either the
marker of a complete snapshot or none. Readers verify the bytes: a process that crashed may have overwritten them.
"""

from __future__ import annotations

import collections
import contextlib
import mmap
import os
from collections.abc import Collection, Iterator
from pathlib import Path

import msgspec

from holdfast.errors import DamagedCheckpoint
from holdfast.format import manifest as fmt
from holdfast.format.shards import RankShard
from holdfast.persist.task import Task
from holdfast.protocol.messages import parse_checkpoint_id
from holdfast.snapshot.shared_buffers import SharedBuffer, slots_in
from holdfast.system import io_pool


class CompletionMarker(msgspec.Struct, frozen=True, kw_only=True):
    """What it takes to write the checkpoint, or to resume from it, apart from the bytes."""

    task: Task
    part: RankShard
    number: int = 0
    """Number of the slot."""

    @property
    def size_bytes(self) -> int:
        return self.task.slots[-1].end if self.task.slots else 0


_markers = msgspec.msgpack.Decoder(CompletionMarker)


def write_marker(task: Task, part: RankShard) -> None:
    """Mark the shared buffer of `task` as complete; does nothing where it has none.

    OSError when the marker cannot be written; the checkpoint does not depend on it.
    """
    if task.marker is None:
        return
    path = Path(task.marker)
    data = msgspec.msgpack.encode(CompletionMarker(task=task, part=part))
    written = path.with_suffix(f".{os.getpid()}")
    try:
        written.write_bytes(bytes.fromhex(fmt.digest(data)) + data)
        written.rename(path)
    except OSError:
        with contextlib.suppress(OSError):
            written.unlink(missing_ok=True)
        raise


def read_marker(slot: SharedBuffer) -> CompletionMarker | None:
    """Read the marker; None where there is none or it is damaged."""
    try:
        sealed = slot.marker.read_bytes()
        digest, data = sealed[:16], sealed[16:]
        if bytes.fromhex(fmt.digest(data)) != digest:
            return None
        return msgspec.structs.replace(_markers.decode(data), number=slot.number)
    except (OSError, msgspec.MsgspecError):
        return None


def markers_of(folder: Path, job: str) -> list[CompletionMarker]:
    """Read the markers of all snapshots of a job, the latest iteration of the newest lineage first."""
    markers = filter(None, map(read_marker, slots_in(folder)))
    found = [each for each in markers if each.task.origin.job == job]
    return sorted(found, key=lambda each: parse_checkpoint_id(each.task.id)[::-1], reverse=True)


@contextlib.contextmanager
def mapped(slot: SharedBuffer, size_bytes: int, *, private: bool = False) -> Iterator[memoryview]:
    """Map the bytes in a slot. DamagedCheckpoint when there are fewer; OSError when it cannot be opened.

    `private` maps them copy-on-write: torch requires writable memory.
    """
    fd = slot.open()
    try:
        if os.fstat(fd).st_size < size_bytes:  # to read beyond its end would be a bus error
            raise DamagedCheckpoint(f"slot {slot.number}", "is shorter than its snapshot")
        access = mmap.ACCESS_COPY if private else mmap.ACCESS_READ
        memory = mmap.mmap(fd, size_bytes, access=access) if size_bytes else None
    finally:
        os.close(fd)
    yield memoryview(memory or b"")


def verify(found: CompletionMarker, payload: memoryview, *, only: Collection[str] | None = None) -> None:
    """Check the bytes against the marker's digests, of tensors named in `only` if given; DamagedCheckpoint if they
    differ.

    Runs on several threads: digests of large pieces do not hold the interpreter lock.
    """
    file, opening = found.part.file, found.part.file.header_bytes
    header = header_of(found.task)
    fmt.check_digest(file, fmt.DigestRange(None, 0, opening, file.header_digest), fmt.digest(header))
    if [t.name for t in found.part.tensors] != [s.name for s in found.task.slots]:
        raise DamagedCheckpoint(file.name, "its completion marker lists other tensors")
    tensors = [tensor for tensor in found.part.tensors if only is None or tensor.name in only]
    left = collections.deque(each for tensor in tensors for each in fmt.tensor_ranges(tensor))

    def check() -> None:
        while True:
            try:
                covered = left.popleft()
            except IndexError:
                return
            fmt.check_digest(file, covered, fmt.digest(payload[covered.start - opening : covered.end - opening]))

    is_small = len(payload) < fmt.SMALL_BYTES
    io_pool.share(check, 1 if is_small else len(os.sched_getaffinity(0)))


def header_of(task: Task) -> bytes:
    """The safetensors header of the file that a snapshot becomes."""
    origin = task.origin
    names = {"job": origin.job, "iteration": str(task.iteration), "rank": str(origin.rank)}
    return fmt.payload_header(task.slots, names)
