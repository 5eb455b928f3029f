"""The operating system as the store uses it: the seam where tests record, refuse or leave out what it does."""

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
"""Locks are held for moments; whoever holds one for so long is stopped or cut off."""
LOCK_POLL_SECONDS = 0.02
RECORD_BYTES = 1 << 20
"""Far more than any record takes."""
CANNOT = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ESPIPE, errno.EINTR)
"""How a file system declines what would only have helped."""
ON_LINUX = sys.platform == "linux"
START_WRITING = 2
WAIT_WRITTEN = 1 | 2 | 4

_libc = ctypes.CDLL(None, use_errno=True)
if ON_LINUX:  # system calls that Python has no name for; elsewhere none of them is made, since all only help
    _offset = ctypes.c_int64
    _libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, _offset, _offset]
    _libc.sync_file_range.argtypes = [ctypes.c_int, _offset, _offset, ctypes.c_uint]
    _libc.mmap.restype = ctypes.c_void_p
    _libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, _offset]
    _libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    _libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
_MAP_FAILED = ctypes.c_void_p(-1).value


class Files:
    """One system call a method, more or less, and the clock. All that changes a disk goes through here.

    Errors are OSError. Those of a call on an open file do not name it: whoever opened it adds that.
    """

    def make_directory(self, path: Path) -> None:
        os.mkdir(path)

    def create(self, path: Path) -> int:
        """A new, empty file, open for writing; FileExistsError when there is one."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)

    def open(self, path: Path) -> int:
        """A regular file, for reading: to open a pipe would wait for its writer, and a device may have no end."""
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.ENXIO, "is no regular file", str(path))
        return fd

    def set_direct(self, fd: int, direct: bool) -> bool:
        """Have an open file bypass the page cache, or not any more; False where it cannot.

        Not O_DIRECT at creation: a file system that refuses it may leave the empty file behind.
        """
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(fd, fcntl.F_SETFL, flags | O_DIRECT if direct else flags & ~O_DIRECT)
        except OSError:
            return False
        return bool(O_DIRECT)

    def reserve(self, fd: int, size_bytes: int) -> None:
        """Set blocks aside where the file system can, so that a full disk shows before the time is spent.

        Not `os.posix_fallocate`: where the file system cannot reserve, that writes a byte to every block instead,
        which over NFS takes longer than the checkpoint.
        """
        _call_if_known("fallocate", fd, 0, 0, size_bytes)

    def write(self, fd: int, data: memoryview, at: int) -> int:
        """So many bytes were written: not always all."""
        return os.pwrite(fd, data, at)

    def read(self, fd: int, target: memoryview, at: int) -> int:
        """So many bytes were read: not always all, 0 at the end of the file."""
        return os.preadv(fd, [target], at)

    def start_writing(self, fd: int, start: int, size_bytes: int) -> None:
        """Have dirty pages written to the device from now on."""
        _call_if_known("sync_file_range", fd, start, size_bytes, START_WRITING)

    def wait_written(self, fd: int, start: int, size_bytes: int) -> None:
        """No promise of durability, but an error that it reports is not reported again by fsync."""
        _call_if_known("sync_file_range", fd, start, size_bytes, WAIT_WRITTEN)

    def forget(self, fd: int, start: int = 0, size_bytes: int = 0) -> None:
        """Drop what the page cache holds of a file, as far as it is on the device."""
        if ON_LINUX:
            os.posix_fadvise(fd, start, size_bytes, os.POSIX_FADV_DONTNEED)

    def truncate(self, fd: int, size_bytes: int) -> None:
        os.ftruncate(fd, size_bytes)

    def sync(self, fd: int) -> None:
        os.fsync(fd)

    def close(self, fd: int) -> None:
        """Whatever it raises, the file is closed."""
        os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def link(self, source: Path, target: Path) -> None:
        """Unlike rename, refuses to replace."""
        os.link(source, target)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def remove_directory(self, path: Path) -> None:
        os.rmdir(path)

    def sync_directory(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def lock(self, path: Path) -> Iterator[None]:
        """Hold a lock between processes. BlockingIOError when another does not let go of it.

        flock, not a file with a process id in it: the kernel lets go when the holder dies, in whatever container.
        """
        # without waiting: where a pipe stands in its place, that would be for good
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK, 0o666)
        try:
            self._wait_for_lock(fd, path)
            try:
                yield
            finally:
                # closing is not enough: a data worker forked meanwhile holds the same lock through its copy
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
                    reason = f"another process has held the lock for {LOCK_SECONDS:.0f} s; is it stopped?"
                    raise BlockingIOError(error.errno, reason, str(path)) from None
            except OSError as error:  # as on Lustre without the option
                reason = f"{error.strerror}: the file system must be mounted so that it has locks (flock)"
                raise OSError(error.errno, reason, str(path)) from error
            self.sleep(LOCK_POLL_SECONDS)

    def free_bytes(self, path: Path) -> int:
        return shutil.disk_usage(path).free

    def device(self, path: Path) -> int:
        """Which file system something is on."""
        return os.stat(path).st_dev

    def now(self) -> float:
        """Seconds since the epoch, for display."""
        return time.time()

    def clock(self) -> float:
        """Seconds, to take differences of."""
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def _call_if_known(name: str, *args: int) -> None:
    """Make a system call that would only help, and pass over that the file system has none of it."""
    if ON_LINUX and getattr(_libc, name)(*args) != 0 and (number := ctypes.get_errno()) not in CANNOT:
        raise OSError(number, os.strerror(number))


def is_cached(fd: int, start: int, size_bytes: int) -> bool:
    """Whether most of a stretch of a file is in the page cache; True where that cannot be known.

    A read with RWF_NOWAIT would tell as well, but starts reading ahead into the page cache: measured, direct
    reads behind such probes take twice as long.
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
