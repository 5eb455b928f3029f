"""The completion marker of a snapshot in shared memory: its description and digests. Does not import torch.

The writer of a checkpoint computes the digests anyway, and then writes the marker, long before the checkpoint is
durable. The marker is removed before the memory is reused, so it always belongs to a complete snapshot. Readers
still verify the bytes: a process that crashed may have overwritten them.
"""

from __future__ import annotations

import collections
import contextlib
import mmap
import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import msgspec

from holdfast.errors import DamagedCheckpoint
from holdfast.format import manifest as fmt
from holdfast.format.shards import RankShard
from holdfast.protocol.ids import parse_checkpoint_id
from holdfast.save.reuse import Task
from holdfast.save.shared_buffers import SharedBuffer, slots_in
from holdfast.system import io_pool


class CompletionMarker(msgspec.Struct, frozen=True, kw_only=True):
    """All that is needed to write the checkpoint or to resume from it, except its bytes."""

    task: Task
    part: RankShard
    number: int = 0
    """Slot number."""

    @property
    def size_bytes(self) -> int:
        return self.task.slots[-1].end if self.task.slots else 0


_markers = msgspec.msgpack.Decoder(CompletionMarker)


def write_marker(task: Task, part: RankShard) -> None:
    """Mark the shared buffer of `task` as complete; does nothing without one. OSError if that fails."""
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
    """Read the marker; None if it is missing or damaged."""
    try:
        content = slot.marker.read_bytes()
        digest, data = content[:16], content[16:]
        if bytes.fromhex(fmt.digest(data)) != digest:
            return None
        return msgspec.structs.replace(_markers.decode(data), number=slot.number)
    except (OSError, msgspec.MsgspecError):
        return None


def markers_of(folder: Path, job: str) -> list[CompletionMarker]:
    """Read the markers of all snapshots of a job, the newest lineage's latest iteration first."""
    markers = filter(None, map(read_marker, slots_in(folder)))
    found = [each for each in markers if each.task.origin.job == job]
    return sorted(found, key=lambda each: parse_checkpoint_id(each.task.id)[::-1], reverse=True)


@contextlib.contextmanager
def mapped(slot: SharedBuffer, size_bytes: int, *, private: bool = False) -> Iterator[memoryview]:
    """Map the first `size_bytes` of a slot, copy-on-write if `private`: torch requires writable memory.

    Raises:
        DamagedCheckpoint: the slot is shorter.
        OSError: the slot cannot be opened.
    """
    fd = slot.open()
    try:
        if os.fstat(fd).st_size < size_bytes:  # reading beyond the end raises SIGBUS
            raise DamagedCheckpoint(f"slot {slot.number}", "is shorter than its snapshot")
        access = mmap.ACCESS_COPY if private else mmap.ACCESS_READ
        memory = mmap.mmap(fd, size_bytes, access=access) if size_bytes else None
    finally:
        os.close(fd)
    yield memoryview(memory or b"")


def verify(found: CompletionMarker, payload: memoryview, *, only: Collection[str] | None = None) -> None:
    """Verify the bytes, or only those of the tensors in `only`, on several threads. Raises DamagedCheckpoint."""
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


def header_of(task: Task, slots: Sequence[fmt.TensorRange] | None = None) -> bytes:
    """Return the safetensors header of a file of this task, with all its tensors or only `slots`."""
    origin = task.origin
    names = {"job": origin.job, "iteration": str(task.iteration), "rank": str(origin.rank)}
    return fmt.payload_header(task.slots if slots is None else slots, names)
