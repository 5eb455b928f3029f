"""Buffers that a supervisor holds for its trainer, so that snapshots survive a crash. Does not import torch.

Each slot is a memory file (memfd). The kernel frees it when the last process that holds it exits, however it
exits, and a small /dev/shm in a container does not limit it. The supervisor keeps the descriptors; the trainer
opens them via /proc, through links in the supervisor's folder. While a slot holds a complete snapshot, the folder
also has its completion marker: see `save.completion_marker`.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.system.files import Files
from holdfast.system.host_memory import can_share

SLOT_COUNT = 64
"""Slots for all ranks of a machine, several per rank; an unused slot takes no memory."""
DESCRIPTOR_SHARE = 4
"""Slots may use one in this many of the descriptors that the supervisor may open."""
_MEMORY, _MARKER, _CLAIM = "slot-{}.memory", "slot-{}.marker", "slot-{}.claim"
_CLAIM_LOCK = "slots.lock"


@dataclass(frozen=True, slots=True)
class SharedBuffer:
    """A slot, identified by the supervisor's folder and its number."""

    folder: Path
    number: int

    @property
    def memory(self) -> Path:
        return self.folder / _MEMORY.format(self.number)

    @property
    def marker(self) -> Path:
        """Path of the completion marker, which exists while the slot holds a complete snapshot."""
        return self.folder / _MARKER.format(self.number)

    def open(self) -> int:
        """Open a new descriptor of the memory. OSError when the supervisor's cannot be reached."""
        return os.open(self.memory, os.O_RDWR | os.O_CLOEXEC)

    def remove_marker(self) -> None:
        """Remove the marker before the memory changes. OSError: the memory must not be changed."""
        self.marker.unlink(missing_ok=True)

    def claim(self) -> bool:
        """Claim the slot for this process; False if a live process has claimed it. Requires the claim lock."""
        try:
            if self.claimed and not _has_ended(self._claim.read_text()):
                return False
            # the claiming process is dead: torchrun, for example, restarts ranks within one start
            self._claim.unlink(missing_ok=True)
            fd = os.open(self._claim, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                os.write(fd, _process_identity(os.getpid()).encode())
            finally:
                os.close(fd)
        except OSError:  # the folder is full: the session uses private memory instead
            return False
        return True

    @property
    def claimed(self) -> bool:
        return self._claim.exists()

    def release(self) -> None:
        with contextlib.suppress(OSError):  # the supervisor releases it when the trainer ends
            self._claim.unlink(missing_ok=True)

    @property
    def _claim(self) -> Path:
        return self.folder / _CLAIM.format(self.number)


def slots_in(folder: Path) -> list[SharedBuffer]:
    """List the slots of a supervisor, whether this process can open them or not."""
    numbers = sorted(int(path.stem.removeprefix("slot-")) for path in folder.glob(_MEMORY.format("*")))
    return [SharedBuffer(folder, number) for number in numbers]


def claim(folder: Path, first: Sequence[int], count: int, *, unmarked: bool = True) -> list[SharedBuffer]:
    """Claim up to `count` slots: those numbered in `first`, then, if `unmarked`, slots without a marker."""
    found = {slot.number: slot for slot in slots_in(folder)}
    empty = [slot for slot in found.values() if unmarked and not slot.marker.exists()]
    wanted = [*(found[number] for number in first if number in found), *empty]
    claimed: list[SharedBuffer] = []
    with contextlib.suppress(OSError), Files().lock(folder / _CLAIM_LOCK):  # none without the lock
        for slot in dict.fromkeys(wanted):
            if len(claimed) < count and slot.claim():
                claimed.append(slot)
    return claimed


def _process_identity(pid: int) -> str:
    """Identify a process by id and start time, since ids are reused. OSError when there is none."""
    state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    if state in "ZX":
        raise ProcessLookupError(pid)
    return f"{pid} {fields[18]}"


def _has_ended(process: str) -> bool:
    """Return whether a process has ended; False when that cannot be determined."""
    try:
        return _process_identity(int(process.partition(" ")[0])) != process
    except (OSError, ValueError) as error:
        return isinstance(error, (FileNotFoundError, ProcessLookupError))


def _descriptor_limit() -> int:
    """Return how many descriptors this process may open."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if most == resource.RLIM_INFINITY else most


class SupervisorMemory:
    """The slots that a supervisor holds; their memory is freed once no process has it open."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._fds: dict[int, int] = {}
        """Descriptors by slot number."""
        self._next = 0
        if not can_share():
            return
        try:
            for _ in range(min(SLOT_COUNT, _descriptor_limit() // DESCRIPTOR_SHARE)):
                self._add()
        except OSError:  # usually too many open files
            self.close()

    def __len__(self) -> int:
        return len(self._fds)

    @property
    def has_snapshot(self) -> bool:
        """At least one slot holds a complete snapshot."""
        return any(slot.marker.exists() for slot in self._slots())

    def release_claims(self) -> None:
        """Release all claims of a trainer that has ended, and replace slots with an incomplete snapshot.

        The replacement has a new number: a process of the old trainer may still write a marker for the old number,
        and the next start must not mistake it for a marker of its own snapshot.
        """
        for slot in self._slots():
            if slot.claimed and not slot.marker.exists():
                self._remove(slot)
                with contextlib.suppress(OSError):
                    self._add()
            slot.release()

    def close(self) -> None:
        for slot in self._slots():
            self._remove(slot)

    def _add(self) -> None:
        number, self._next = self._next, self._next + 1
        self._fds[number] = fd = os.memfd_create(f"holdfast-{os.getpid()}-{number}", os.MFD_CLOEXEC)
        SharedBuffer(self._folder, number).memory.symlink_to(f"/proc/{os.getpid()}/fd/{fd}")

    def _remove(self, slot: SharedBuffer) -> None:
        with contextlib.suppress(OSError):
            slot.memory.unlink(missing_ok=True)
        os.close(self._fds.pop(slot.number))

    def _slots(self) -> list[SharedBuffer]:
        return [SharedBuffer(self._folder, number) for number in self._fds]
