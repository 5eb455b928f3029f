"""Memory that a supervisor holds for the snapshots of its trainer, so that they outlive it. Knows no torch.

Each slot is a memory file (memfd): no file system has a name for it, so nothing is left of it once the last
process that holds it is gone, however that ended, and a container's small /dev/shm does not limit it. The
supervisor keeps the descriptors; the trainer opens them by way of /proc, through links in the folder that both
know. Beside a slot lies its seal, as long as the slot holds a whole snapshot: see `persist.sealing`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.system.host_memory import can_share

COUNT = 64
"""For all ranks of a machine, each with as many as it has in flight; one that is not used takes no memory."""
MOST_DESCRIPTORS = 4
"""One in so many of those that the supervisor may have open."""
PATIENCE_SECONDS, LOOK_SECONDS = 5.0, 0.002
"""For the turn to claim slots, which takes others a millisecond."""
_MEMORY, _SEAL, _CLAIM = "slot-{}.memory", "slot-{}.seal", "slot-{}.claim"
_TURN = "slots.lock"


@dataclass(frozen=True, slots=True)
class SharedBuffer:
    """One of them, as any process knows it that knows the folder."""

    folder: Path
    number: int

    @property
    def memory(self) -> Path:
        return self.folder / _MEMORY.format(self.number)

    @property
    def seal(self) -> Path:
        """There while the memory holds a whole snapshot, which it describes."""
        return self.folder / _SEAL.format(self.number)

    def open(self) -> int:
        """A descriptor of the memory's own. OSError where the supervisor's cannot be reached."""
        return os.open(self.memory, os.O_RDWR | os.O_CLOEXEC)

    def unseal(self) -> None:
        """The memory is about to change. OSError where the seal cannot be removed: then it must not."""
        self.seal.unlink(missing_ok=True)

    def claim(self) -> bool:
        """Take it for a session; False where another has it that lives. For whoever has the turn."""
        try:
            if self.claimed and not _is_gone(self._claim.read_text()):
                return False
            # a launcher, such as torchrun, may have started dead ranks again by itself: theirs is free
            self._claim.unlink(missing_ok=True)
            fd = os.open(self._claim, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                os.write(fd, _process(os.getpid()).encode())
            finally:
                os.close(fd)
        except OSError:  # the folder has no room left: snapshots can lie in memory of the session's own
            return False
        return True

    @property
    def claimed(self) -> bool:
        return self._claim.exists()

    def release(self) -> None:
        with contextlib.suppress(OSError):  # it lasts no longer than this start of the trainer anyway
            self._claim.unlink(missing_ok=True)

    @property
    def _claim(self) -> Path:
        return self.folder / _CLAIM.format(self.number)


def slots_in(folder: Path) -> list[SharedBuffer]:
    """Those that a supervisor holds, whether they can be opened here or not."""
    numbers = sorted(int(path.stem.removeprefix("slot-")) for path in folder.glob(_MEMORY.format("*")))
    return [SharedBuffer(folder, number) for number in numbers]


def claim(folder: Path, first: Sequence[int], count: int, *, unsealed: bool = True) -> list[SharedBuffer]:
    """Take up to `count` slots for a session: those of the numbers `first`, then `unsealed` ones."""
    found = {slot.number: slot for slot in slots_in(folder)}
    empty = [slot for slot in found.values() if unsealed and not slot.seal.exists()]
    wanted = [*(found[number] for number in first if number in found), *empty]
    claimed: list[SharedBuffer] = []
    with _turn(folder) as is_ours:
        for slot in dict.fromkeys(wanted):
            if is_ours and len(claimed) < count and slot.claim():
                claimed.append(slot)
    return claimed


@contextlib.contextmanager
def _turn(folder: Path) -> Iterator[bool]:
    """One process at a time; False where that cannot be had."""
    try:
        fd = os.open(folder / _TURN, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        yield False
        return
    deadline = time.monotonic() + PATIENCE_SECONDS
    try:
        while not (is_ours := _locked(fd)) and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)
        yield is_ours
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)  # a child that was forked meanwhile has it open, too
        os.close(fd)


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _process(pid: int) -> str:
    """Which process has a number now: numbers come again. OSError where none has."""
    state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    if state in "ZX":
        raise ProcessLookupError(pid)
    return f"{pid} {fields[18]}"


def _is_gone(process: str) -> bool:
    """Nobody is, of whom nothing is known."""
    try:
        return _process(int(process.partition(" ")[0])) != process
    except (OSError, ValueError) as error:
        return isinstance(error, (FileNotFoundError, ProcessLookupError))


def _descriptors() -> int:
    """As many as this process may have."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if most == resource.RLIM_INFINITY else most


class Held:
    """The slots, as the supervisor has them: their memory lasts as long as this, or who else has opened it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._fds: dict[int, int] = {}
        """By number of the slot."""
        self._next = 0
        if not can_share():
            return
        try:
            for _ in range(min(COUNT, _descriptors() // MOST_DESCRIPTORS)):
                self._add()
        except OSError:  # too many open files, as a rule
            self.close()

    def __len__(self) -> int:
        return len(self._fds)

    @property
    def sealed(self) -> bool:
        """At least one holds a snapshot."""
        return any(slot.seal.exists() for slot in self._slots())

    def unclaim(self) -> None:
        """Those who had claimed a slot are gone. What they left in one that is not sealed is no good to anybody.

        A slot of another number takes its place: a helper of theirs may be about to seal what it held, and the
        next start must not find that beside what it has written there itself.
        """
        for slot in self._slots():
            if slot.claimed and not slot.seal.exists():
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
