"""File operations that fail, or that are recorded to simulate a power cut at any point.

What a power cut may leave is modelled after ALICE (OSDI'14), at its strictest: data that was not synced may be
there, missing or half there, and each name that was not synced into its directory may be there or not, all
independently of each other and of the order in which they were asked for.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.system.files import Files


@contextlib.contextmanager
def memory_directory() -> Iterator[Path]:
    """A directory in which syncing costs nothing, where there is one."""
    place = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=place) as directory:
        yield Path(directory)


Tree = dict[str, Any]
"""A directory's names: bytes for a file, a Tree for a directory."""


class FailingFiles(Files):
    """Refuses the `nth` of some calls with an error; with `always`, all that come after it, too."""

    def __init__(
        self, calls: tuple[str, ...], nth: int, error: int, *, always: bool = False, direct: bool = True
    ) -> None:
        self.left, self.error, self.always, self.direct = nth, error, always, direct
        self.failed = 0
        for name in calls:
            setattr(self, name, self._failing(name))

    def set_direct(self, fd, direct):
        return self.direct and super().set_direct(fd, direct)

    def _failing(self, name: str):
        real = getattr(self, name)

        def call(*args):
            self.left -= 1
            if self.left > 0 or (self.left < 0 and not self.always):
                return real(*args)
            self.failed += 1
            if name == "close":
                real(*args)  # an error of close does not keep the file open
            named = [str(arg) for arg in args if isinstance(arg, Path)]
            raise OSError(self.error, os.strerror(self.error), *named[:1])

        return call


class ShortFiles(Files):
    """Writes and reads at most so many bytes a call."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes

    def write(self, fd, data, at):
        return super().write(fd, data[: self.most_bytes], at)

    def read(self, fd, target, at):
        return super().read(fd, target[: self.most_bytes], at)


class CacheFiles(Files):
    """A file system without direct I/O: one that says so at once, or only when it is written to or read from."""

    def __init__(self, *, says_so: bool) -> None:
        self.says_so = says_so
        self.direct: set[int] = set()
        self.refused = 0

    def set_direct(self, fd, direct):
        if self.says_so:
            return False
        (self.direct.add if direct else self.direct.discard)(fd)
        return True

    def write(self, fd, data, at):
        self._refuse(fd)
        return super().write(fd, data, at)

    def read(self, fd, target, at):
        self._refuse(fd)
        return super().read(fd, target, at)

    def close(self, fd):
        self.direct.discard(fd)
        super().close(fd)

    def _refuse(self, fd):
        if fd in self.direct:
            self.refused += 1
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


class SimulatedProcessDeath(BaseException):
    """The simulated process ended. A BaseException, so that no cleanup code runs after it."""


class Effect(NamedTuple):
    """A change to one file or directory, durable once that is synced."""

    inode: int
    change: Any
    """(at, bytes) or a length for a file, a tuple of (name, inode or None) for a directory."""


class Sync(NamedTuple):
    inode: int


class RecordedFiles(Files):
    """Works below one directory, and keeps what it did. Dies at the `dies_at`-th change, leaves out the
    `without_sync`-th sync.
    """

    BASE = 0

    def __init__(self, base: Path, *, dies_at: int | None = None, without_sync: int | None = None) -> None:
        self.base, self.dies_at, self.without_sync = base, dies_at, without_sync
        self.log: list[Effect | Sync] = []
        self.directories = {self.BASE}
        self.changes = self.syncs = 0
        self._inodes = {base: self.BASE}
        self._open: dict[int, int] = {}
        self._numbers = itertools.count(1)

    def revive(self, *, without_sync: int | None = None) -> None:
        """A new process goes on where the other died."""
        self.dies_at, self.without_sync, self.syncs = None, without_sync, 0
        for fd in self._open:
            os.close(fd)
        self._open = {}

    def now(self):
        return 0.0

    def make_directory(self, path):
        self._act(super().make_directory, path)
        inode = self._new(path)
        self.directories.add(inode)

    def create(self, path):
        fd = self._act(super().create, path)
        self._open[fd] = self._new(path)
        return fd

    def reserve(self, fd, size_bytes):
        self._act(super().reserve, fd, size_bytes)
        self._note(fd, size_bytes)

    def write(self, fd, data, at):
        count = self._act(super().write, fd, data, at)
        self._note(fd, (at, bytes(data[:count])))
        return count

    def truncate(self, fd, size_bytes):
        self._act(super().truncate, fd, size_bytes)
        self._note(fd, size_bytes)

    def sync(self, fd):
        self._sync(super().sync, fd, self._open[fd])

    def close(self, fd):
        if fd in self._open:
            self._act(super().close, fd)
            del self._open[fd]
        else:
            super().close(fd)  # of a file that was only read

    def rename(self, source, target):
        assert source.parent == target.parent, "only within a directory is a rename one change"
        self._act(super().rename, source, target)
        inode = self._inodes[source]
        moved = {path: target / path.relative_to(source) for path in self._inodes if path.is_relative_to(source)}
        self._inodes.update({new: self._inodes.pop(old) for old, new in moved.items()})
        self._enter(source.parent, (source.name, None), (target.name, inode))

    def link(self, source, target):
        self._act(super().link, source, target)
        self._inodes[target] = self._inodes[source]
        self._enter(target.parent, (target.name, self._inodes[source]))

    def unlink(self, path):
        self._remove(super().unlink, path)

    def remove_directory(self, path):
        self._remove(super().remove_directory, path)

    def sync_directory(self, path):
        self._sync(super().sync_directory, path, self._inodes[path])

    def _act(self, call, *args):
        if self.dies_at is not None:
            self.changes += 1
            if self.changes >= self.dies_at:
                raise SimulatedProcessDeath
        return call(*args)

    def _new(self, path: Path) -> int:
        self._inodes[path] = inode = next(self._numbers)
        self._enter(path.parent, (path.name, inode))
        return inode

    def _remove(self, call, path: Path) -> None:
        self._act(call, path)
        del self._inodes[path]
        self._enter(path.parent, (path.name, None))

    def _note(self, fd: int, change: Any) -> None:
        self.log.append(Effect(self._open[fd], change))

    def _enter(self, directory: Path, *names: tuple[str, int | None]) -> None:
        self.log.append(Effect(self._inodes[directory], names))

    def _sync(self, call, what, inode: int) -> None:
        self.syncs += 1
        if self.syncs != self.without_sync:
            self._act(call, what)
            self.log.append(Sync(inode))


def crash_states(files: RecordedFiles, point: int) -> Iterator[Tree]:
    """What a power cut may leave after the first `point` entries of the log."""
    log = files.log[:point]
    last_sync = {entry.inode: at for at, entry in enumerate(log) if isinstance(entry, Sync)}
    effects = [(at, entry) for at, entry in enumerate(log) if isinstance(entry, Effect)]
    reachable = _reachable(files, effects, last_sync)
    effects = [(at, effect) for at, effect in effects if effect.inode in reachable]
    choices = [_variants(effect, at < last_sync.get(effect.inode, -1), files) for at, effect in effects]
    for chosen in itertools.product(*choices):
        yield _tree(files, [effect for effect in chosen if effect is not None])


def _variants(effect: Effect, durable: bool, files: RecordedFiles) -> list[Effect | None]:
    if durable:
        return [effect]
    if effect.inode in files.directories or isinstance(effect.change, int):
        return [None, effect]
    at, data = effect.change
    return [None, Effect(effect.inode, (at, data[: len(data) // 2])), effect]


def _reachable(files: RecordedFiles, effects: list[tuple[int, Effect]], last_sync: dict[int, int]) -> set[int]:
    """Return the inodes that some state can reach by name; states need not differ in the others."""
    names: dict[int, dict[str, set[int | None]]] = {}
    for at, (inode, change) in effects:
        if inode in files.directories:
            for name, target in change:
                known = names.setdefault(inode, {}).setdefault(name, {None})
                if at < last_sync.get(inode, -1):
                    known.clear()
                known.add(target)
    found, look = set[int](), [files.BASE]
    while look:
        inode = look.pop()
        if inode not in found:
            found.add(inode)
            look += [t for targets in names.get(inode, {}).values() for t in targets if t is not None]
    return found


def _tree(files: RecordedFiles, effects: list[Effect]) -> Tree:
    contents: dict[int, Any] = {}
    for inode, change in effects:
        if inode in files.directories:
            contents.setdefault(inode, {}).update(change)
        else:
            contents[inode] = _changed(contents.get(inode, b""), change)

    def grown(inode: int) -> Any:
        if inode not in files.directories:
            return contents.get(inode, b"")
        return {name: grown(to) for name, to in sorted(contents.get(inode, {}).items()) if to is not None}

    tree: Tree = grown(files.BASE)
    return tree


def _changed(data: bytes, change: Any) -> bytes:
    if isinstance(change, int):
        return data[:change].ljust(change, b"\0")
    at, written = change
    return data[:at].ljust(at, b"\0") + written + data[at + len(written) :]


def plant(tree: Tree, at: Path) -> None:
    """Make a directory of a state."""
    at.mkdir()
    for name, what in tree.items():
        if isinstance(what, dict):
            plant(what, at / name)
        else:
            (at / name).write_bytes(what)
