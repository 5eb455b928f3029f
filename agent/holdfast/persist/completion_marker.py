"""The seal of a snapshot in a slot: what it is, and digests of all its bytes. Knows no torch.

Whoever writes a checkpoint digests the snapshot anyway; as soon as it has, and long before the checkpoint is
durable, it seals the slot. The seal goes before the slot is used again. So at any instant there is either a seal
of a whole snapshot or none. Nobody takes a seal's word for the bytes: a process that crashed may have scribbled.
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


class Seal(msgspec.Struct, frozen=True, kw_only=True):
    """All that it takes to write the checkpoint, or to go on from it, but for the bytes."""

    task: Task
    part: RankShard
    number: int = 0
    """Of the slot."""

    @property
    def size_bytes(self) -> int:
        return self.task.slots[-1].end if self.task.slots else 0


_seals = msgspec.msgpack.Decoder(Seal)


def seal(task: Task, part: RankShard) -> None:
    """Say that the slot of `task` holds this whole; without one there is nothing to say.

    OSError when it cannot be said: the checkpoint is worth as much without.
    """
    if task.seal is None:
        return
    path = Path(task.seal)
    data = msgspec.msgpack.encode(Seal(task=task, part=part))
    written = path.with_suffix(f".{os.getpid()}")
    try:
        written.write_bytes(bytes.fromhex(fmt.digest(data)) + data)
        written.rename(path)
    except OSError:
        with contextlib.suppress(OSError):
            written.unlink(missing_ok=True)
        raise


def read_seal(slot: SharedBuffer) -> Seal | None:
    """None where there is none, or none that is as it was written."""
    try:
        sealed = slot.seal.read_bytes()
        digest, data = sealed[:16], sealed[16:]
        if bytes.fromhex(fmt.digest(data)) != digest:
            return None
        return msgspec.structs.replace(_seals.decode(data), number=slot.number)
    except (OSError, msgspec.MsgspecError):
        return None


def seals_of(folder: Path, job: str) -> list[Seal]:
    """Of all slots with a snapshot of that job, the newest lineage's latest iteration first."""
    seals = filter(None, map(read_seal, slots_in(folder)))
    found = [each for each in seals if each.task.origin.job == job]
    return sorted(found, key=lambda each: parse_checkpoint_id(each.task.id)[::-1], reverse=True)


@contextlib.contextmanager
def mapped(slot: SharedBuffer, size_bytes: int, *, private: bool = False) -> Iterator[memoryview]:
    """The bytes in a slot. DamagedCheckpoint when there are fewer; OSError when it cannot be opened.

    `private`: what is written to them, if anything is, goes to a copy; torch wants memory that can be written to.
    """
    fd = slot.open()
    try:
        if os.fstat(fd).st_size < size_bytes:  # to read beyond its end would be a bus error
            raise DamagedCheckpoint(f"slot {slot.number}", "is shorter than what it is to hold")
        access = mmap.ACCESS_COPY if private else mmap.ACCESS_READ
        memory = mmap.mmap(fd, size_bytes, access=access) if size_bytes else None
    finally:
        os.close(fd)
    yield memoryview(memory or b"")


def verify(found: Seal, payload: memoryview, *, only: Collection[str] | None = None) -> None:
    """DamagedCheckpoint when the bytes are not those that were sealed; `only` those of tensors of these names.

    On several threads: the digests of large pieces are made without the interpreter lock.
    """
    file, opening = found.part.file, found.part.file.header_bytes
    header = header_of(found.task)
    fmt.check_digest(file, fmt.Piece("the header", 0, opening, file.header_digest), fmt.digest(header))
    if [t.name for t in found.part.tensors] != [s.name for s in found.task.slots]:
        raise DamagedCheckpoint(file.name, "its seal names other tensors than there are")
    tensors = [tensor for tensor in found.part.tensors if only is None or tensor.name in only]
    pieces = collections.deque(piece for tensor in tensors for piece in fmt.pieces_of(tensor))

    def check() -> None:
        while True:
            try:
                piece = pieces.popleft()
            except IndexError:
                return
            fmt.check_digest(file, piece, fmt.digest(payload[piece.start - opening : piece.end - opening]))

    is_small = len(payload) < fmt.SMALL_BYTES
    io_pool.share(check, 1 if is_small else len(os.sched_getaffinity(0)))


def header_of(task: Task) -> bytes:
    """The opening of the file that a snapshot becomes."""
    origin = task.origin
    names = {"job": origin.job, "iteration": str(task.iteration), "rank": str(origin.rank)}
    return fmt.payload_header(task.slots, names)
