"""System calls of the store; tests replace them to record calls and to inject faults."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import shutil
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path

O_DIRECT: int = getattr(os, "O_DIRECT", 0)
LOCK_SECONDS = 10.0
"""Timeout of a lock, which is held for moments: the holder is stopped or disconnected."""
LOCK_POLL_SECONDS = 0.02
RECORD_BYTES = 1 << 20
"""Upper limit of the size of a record."""
UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ESPIPE, errno.EINTR)
"""Errors of optional system calls that a file system does not support."""
DIRECTORY = os.O_DIRECTORY | (getattr(os, "O_PATH", 0) or os.O_RDONLY)
"""Flags to open a directory for names below it; O_PATH needs no permission to list it."""
LINK = "is a symbolic link, which is not followed inside a store: replace it by its target, or mount that there"
DEEPEST = 64
"""Levels of directories that are listed or removed; Holdfast makes 2."""
ON_LINUX = sys.platform == "linux"
START_WRITING = 2
WAIT_WRITTEN = 1 | 2 | 4

_libc = ctypes.CDLL(None, use_errno=True)
if ON_LINUX:  # system calls that Python lacks; all are optional
    _offset = ctypes.c_int64
    _libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, _offset, _offset]
    _libc.sync_file_range.argtypes = [ctypes.c_int, _offset, _offset, ctypes.c_uint]
    _libc.mmap.restype = ctypes.c_void_p
    _libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, _offset]
    _libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    _libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
_MAP_FAILED = ctypes.c_void_p(-1).value


class Files:
    """The system calls that change a disk, and the clock.

    Errors are OSErrors. Those of calls on open files do not name the file: the caller adds the name.

    Below `root` no symbolic link is followed, whatever else changes the directories meanwhile: each directory is
    opened relative to the one above it.
    """

    root: Path | None = None
    """A directory, or a link to one, that operations on paths below it do not leave."""

    def make_directory(self, path: Path) -> None:
        with self._within(path) as (fd, name):
            os.mkdir(name, dir_fd=fd)

    def create(self, path: Path) -> int:
        """Create an empty file and open it for writing; FileExistsError when it exists."""
        with self._within(path) as (fd, name):
            return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644, dir_fd=fd)

    def open(self, path: Path) -> int:
        """Open a regular file for reading; a pipe would block, and a device may be endless."""
        with self._within(path) as (parent, name):
            fd = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW, dir_fd=parent)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.ENXIO, "is not a regular file", str(path))
        return fd

    def set_direct(self, fd: int, direct: bool) -> bool:
        """Switch direct I/O of an open file on or off; return whether it is supported.

        O_DIRECT is not used at creation: a file system that refuses it may leave the empty file behind.
        """
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(fd, fcntl.F_SETFL, flags | O_DIRECT if direct else flags & ~O_DIRECT)
        except OSError:
            return False
        return bool(O_DIRECT)

    def reserve(self, fd: int, size_bytes: int) -> None:
        """Reserve blocks where the file system supports it, so that a full disk is detected before writing.

        `os.posix_fallocate` is not used: without support it writes a byte to every block, which takes longer on
        NFS than writing the checkpoint.
        """
        _call_if_known("fallocate", fd, 0, 0, size_bytes)

    def write(self, fd: int, data: memoryview, at: int) -> int:
        """Write bytes and return how many were written, which may not be all."""
        return os.pwrite(fd, data, at)

    def read(self, fd: int, target: memoryview, at: int) -> int:
        """Read bytes and return how many were read, which may not be all; 0 at the end of the file."""
        return os.preadv(fd, [target], at)

    def start_writing(self, fd: int, start: int, size_bytes: int) -> None:
        """Start to write dirty pages to the device."""
        _call_if_known("sync_file_range", fd, start, size_bytes, START_WRITING)

    def wait_written(self, fd: int, start: int, size_bytes: int) -> None:
        """Wait for dirty pages, without making them durable; fsync does not repeat an error raised here."""
        _call_if_known("sync_file_range", fd, start, size_bytes, WAIT_WRITTEN)

    def forget(self, fd: int, start: int = 0, size_bytes: int = 0) -> None:
        """Drop clean pages of a file from the page cache."""
        if ON_LINUX:
            os.posix_fadvise(fd, start, size_bytes, os.POSIX_FADV_DONTNEED)

    def truncate(self, fd: int, size_bytes: int) -> None:
        os.ftruncate(fd, size_bytes)

    def sync(self, fd: int) -> None:
        os.fsync(fd)

    def close(self, fd: int) -> None:
        """Close a file; it is closed even if this raises."""
        os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        with self._within(source) as (fd, name), self._within(target) as (target_fd, target_name):
            os.rename(name, target_name, src_dir_fd=fd, dst_dir_fd=target_fd)

    def link(self, source: Path, target: Path) -> None:
        """Create a hard link, of a symbolic link to that itself; unlike rename, it does not replace a file."""
        with self._within(source) as (fd, name), self._within(target) as (target_fd, target_name):
            os.link(name, target_name, src_dir_fd=fd, dst_dir_fd=target_fd, follow_symlinks=False)

    def unlink(self, path: Path) -> None:
        with self._within(path) as (fd, name):
            os.unlink(name, dir_fd=fd)

    def remove_directory(self, path: Path) -> None:
        with self._within(path) as (fd, name):
            os.rmdir(name, dir_fd=fd)

    def sync_directory(self, path: Path) -> None:
        with self._directory(path, os.O_RDONLY | os.O_DIRECTORY) as fd:
            os.fsync(fd)

    def stat(self, path: Path) -> os.stat_result | None:
        """Return what a path is, a link as itself; None when there is nothing."""
        try:
            with self._within(path) as (fd, name):
                return os.stat(name, dir_fd=fd, follow_symlinks=fd is None)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def is_directory(self, path: Path) -> bool:
        return (found := self.stat(path)) is not None and stat.S_ISDIR(found.st_mode)

    def links_and_holders(self, path: Path, name: str) -> list[str]:
        """List the directories in a directory that hold `name`, and the links, which are not followed."""
        found = []
        with self._directory(path, os.O_RDONLY | os.O_DIRECTORY) as fd, os.scandir(fd) as entries:
            for each in entries:
                with contextlib.suppress(FileNotFoundError):
                    if each.is_dir(follow_symlinks=False):
                        with contextlib.suppress(PermissionError):  # it may hold it
                            os.stat(f"{each.name}/{name}", dir_fd=fd, follow_symlinks=False)
                    elif not each.is_symlink():
                        continue
                    found.append(each.name)
        return found

    def names(self, path: Path) -> list[str]:
        with self._directory(path, os.O_RDONLY | os.O_DIRECTORY) as fd:
            return os.listdir(fd)

    def tree(self, path: Path) -> Iterator[tuple[Path, os.stat_result]]:
        """Yield what is at and below a path, the contents of a directory before it.

        What is mounted there is not part of it: to remove it would empty another directory.
        """
        with self._directory(path.parent, DIRECTORY) as fd:
            mount = _mount(fd)
        left: list[tuple[Path, int, os.stat_result | None]] = [(path, 0, None)]
        while left:
            at, depth, listed = left.pop()
            if listed is not None:
                yield at, listed
                continue
            with contextlib.suppress(OSError):  # another process may be removing it
                if (found := self.stat(at)) is None:
                    continue
                if stat.S_ISDIR(found.st_mode):
                    with self._directory(at, os.O_RDONLY | os.O_DIRECTORY) as fd:
                        if _mount(fd) != mount:
                            continue
                        names = os.listdir(fd) if depth < DEEPEST else []
                    left.append((at, depth, found))
                    left += [(at / name, depth + 1, None) for name in names]
                else:
                    left.append((at, depth, found))

    @contextlib.contextmanager
    def _within(self, path: Path) -> Iterator[tuple[int | None, str | Path]]:
        """Open the directory that a path below the root is in, and yield it with the name there."""
        if self.root is None or path == self.root or not path.is_relative_to(self.root):
            yield None, path
            return
        with self._directory(path.parent, DIRECTORY) as fd, _naming(path, path.name):
            yield fd, path.name

    @contextlib.contextmanager
    def _directory(self, path: Path, flags: int) -> Iterator[int]:
        """Open a directory, one component at a time from the root on."""
        root = self.root if self.root is not None and path.is_relative_to(self.root) else path
        names = path.relative_to(root).parts
        fd = os.open(root, DIRECTORY if names else flags)
        try:
            at = root
            for name in names:
                at /= name
                with _naming(at, name):
                    inner = os.open(name, (flags if at == path else DIRECTORY) | os.O_NOFOLLOW, dir_fd=fd)
                os.close(fd)
                fd = inner
            yield fd
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def lock(self, path: Path) -> Iterator[None]:
        """Hold a lock between processes. BlockingIOError when another process keeps it too long.

        The kernel releases a flock when its holder dies, in any container, unlike a file with a process id.
        """
        # O_NONBLOCK: opening a pipe in its place would wait forever
        flags = os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW
        with self._within(path) as (parent, name):
            fd = os.open(name, flags, 0o666, dir_fd=parent)
        try:
            self._wait_for_lock(fd, path)
            try:
                yield
            finally:
                # closing is not enough: a data worker that was forked meanwhile shares the lock
                fcntl.flock(fd, fcntl.LOCK_UN)
        finally:
            os.close(fd)

    def _wait_for_lock(self, fd: int, path: Path) -> None:
        deadline = self.clock() + LOCK_SECONDS
        while True:
            try:
                return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                if self.clock() > deadline:
                    reason = (
                        f"another process has held the lock for {LOCK_SECONDS:.0f} s; check whether it is stopped"
                    )
                    raise BlockingIOError(error.errno, reason, str(path)) from None
            except OSError as error:  # as on Lustre without the option
                reason = f"{error.strerror}: mount the file system with support for locks (flock)"
                raise OSError(error.errno, reason, str(path)) from error
            self.sleep(LOCK_POLL_SECONDS)

    def free_bytes(self, path: Path) -> int:
        with self._directory(path, DIRECTORY) as fd:
            return shutil.disk_usage(fd).free

    def total_bytes(self, path: Path) -> int:
        with self._directory(path, DIRECTORY) as fd:
            return shutil.disk_usage(fd).total

    def device(self, path: Path) -> int:
        """Return the id of the file system that a directory is on."""
        with self._directory(path, DIRECTORY) as fd:
            return os.fstat(fd).st_dev

    def now(self) -> float:
        """Return seconds since the epoch, for display."""
        return time.time()

    def clock(self) -> float:
        """Return seconds of a monotonic clock."""
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


@contextlib.contextmanager
def _naming(path: Path, name: str | Path) -> Iterator[None]:
    """Give an error of a call on a name in an open directory the whole path, and say so if it is a link."""
    try:
        yield
    except OSError as error:
        if error.filename == name:
            error.filename = str(path)
            if error.errno in (errno.ELOOP, errno.ENOTDIR) and path.is_symlink():
                raise OSError(errno.ELOOP, LINK, str(path)) from error
        elif error.filename2 == name:
            error.filename2 = str(path)
        raise


def _mount(fd: int) -> int | str:
    """Identify the mount that a directory is on: two of one file system have the same st_dev."""
    with contextlib.suppress(OSError), open(f"/proc/self/fdinfo/{fd}") as info:
        return next((line for line in info if line.startswith("mnt_id:")), os.fstat(fd).st_dev)
    return os.fstat(fd).st_dev


def _call_if_known(name: str, *args: int) -> None:
    """Make an optional system call, and ignore that the file system does not support it."""
    if ON_LINUX and getattr(_libc, name)(*args) != 0 and (number := ctypes.get_errno()) not in UNSUPPORTED:
        raise OSError(number, os.strerror(number))


def is_cached(fd: int, start: int, size_bytes: int) -> bool:
    """Return whether most of a range of a file is in the page cache; True where that is unknown.

    A read with RWF_NOWAIT would show it as well, but starts read-ahead into the page cache: direct reads after
    such a probe take twice as long.
    """
    first = start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    length = start + size_bytes - first
    pages = ctypes.create_string_buffer(-(-length // mmap.PAGESIZE))
    if not ON_LINUX or (at := _libc.mmap(None, length, mmap.PROT_READ, mmap.MAP_SHARED, fd, first)) == _MAP_FAILED:
        return True
    try:
        known = _libc.mincore(at, length, pages) == 0
    finally:
        _libc.munmap(at, length)
    return not known or pages.raw.count(0) * 2 < len(pages)
