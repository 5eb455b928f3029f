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
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from holdfast.errors import DamagedCheckpoint
from holdfast.format import manifest as fmt
from holdfast.protocol.ids import parse_checkpoint_id
from holdfast.save.draft import Draft
from holdfast.save.shared_buffers import SharedBuffer, slots_in
from holdfast.system import io_pool


@dataclass(frozen=True, slots=True)
class CompletionMarker:
    """A completion marker: everything that a write of the checkpoint or a resume needs, except the bytes."""

    draft: Draft
    number: int
    """Slot number."""


_drafts = msgspec.msgpack.Decoder(Draft)
_MAGIC = b"HFmark02"
"""First bytes of a marker, with the version of its content."""
_DATA_AT = len(_MAGIC) + 16
"""The digest is in between."""


def write_marker(path: Path, draft: Draft) -> None:
    """Mark a shared buffer as complete: it holds the tensors of `draft`. OSError if that fails."""
    data = msgspec.msgpack.encode(draft)
    put_marker(path, _MAGIC + bytes.fromhex(fmt.digest(data)) + data)


def put_marker(path: Path, content: bytes) -> None:
    """Write a marker with the content of another one. OSError if that fails."""
    written = path.with_suffix(f".{os.getpid()}")
    try:
        written.write_bytes(content)
        written.rename(path)
    except OSError:
        with contextlib.suppress(OSError):
            written.unlink(missing_ok=True)
        raise


def read_marker(slot: SharedBuffer) -> CompletionMarker | None:
    """Read the marker; None if it is missing or damaged, or another version of Holdfast wrote it."""
    try:
        return decode_marker(slot.marker.read_bytes(), slot.number)
    except OSError:
        return None


def decode_marker(content: bytes, number: int) -> CompletionMarker | None:
    """Decode the content of the marker of a slot; None if it is damaged, or of another version."""
    data = marked_content(content)
    try:
        return None if data is None else CompletionMarker(_drafts.decode(data), number)
    except msgspec.MsgspecError:
        return None


def marked_content(content: bytes) -> bytes | None:
    """Return the description in the content of a marker; None if it is damaged, or of another version."""
    digest, data = content[len(_MAGIC) : _DATA_AT], content[_DATA_AT:]
    return data if content.startswith(_MAGIC) and bytes.fromhex(fmt.digest(data)) == digest else None


def has_other_version(slot: SharedBuffer) -> bool:
    """Return whether another version of Holdfast wrote the marker of a slot, whose memory is kept."""
    try:
        content = slot.marker.read_bytes()
    except OSError:
        return False
    return bool(content) and not content.startswith(_MAGIC)


def markers_of(folder: Path, job: str) -> list[CompletionMarker]:
    """Read the markers of all snapshots of a job, the newest lineage's latest iteration first."""
    markers = filter(None, map(read_marker, slots_in(folder)))
    found = [each for each in markers if each.draft.job == job]
    return sorted(found, key=lambda each: parse_checkpoint_id(each.draft.id)[::-1], reverse=True)


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
    draft, (file, *_) = found.draft, found.draft.files
    opening = file.header_bytes
    fmt.check_digest(file, fmt.DigestRange(None, 0, opening, file.header_digest), fmt.digest(draft.header()))
    if [t.name for t in draft.tensors] != [s.name for s in draft.slots]:
        raise DamagedCheckpoint(file.name, "its completion marker lists other tensors")
    tensors = [tensor for tensor in draft.tensors if only is None or tensor.name in only]
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
