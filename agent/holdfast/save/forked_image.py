"""A copy-on-write image of memory of this process, and the forked child that writes it to files.

After CRUM (Garg, Mohan, Sullivan, Cooperman, CLUSTER 2018). The other threads do not exist in the child, and their
locks stay locked there. So the child only calls the kernel, and digests and hashes memory: no torch, no logging,
no allocation beyond small objects. It leaves by `os._exit`, so that no handler and no finalizer runs.
"""

from __future__ import annotations

import array
import contextlib
import errno
import gc
import itertools
import os
import re
import select
import signal
import socket
import struct
import time
import warnings
from collections.abc import Sequence
from typing import NoReturn

import xxhash

from holdfast.errors import HoldfastError
from holdfast.format.manifest import CHUNK_BYTES, digest
from holdfast.system.memory_maps import AddressRange, inherited_image
from holdfast.system.processes import HELPER_OOM_SCORE

READY = b"R"
READY_SECONDS = 30.0
"""Longest start of the child, usually milliseconds: a handler of a library may wait forever."""
END_SECONDS = 5.0
PARENT_POLL_SECONDS = 0.5
"""Time between checks of an idle child that its parent lives; a writing child checks before each block."""
WRITE_BYTES = 4 << 20
LEAVES_AT_ONCE = 4096
NICENESS = 5
"""Niceness of the child. Training runs first, but at 10, as for background threads, the child took five times as
long as a copy.
"""
_THREADS = r"This process .*is multi-threaded"
"""Beginning of a warning of Python 3.12 and later about forks of a process with threads: the child waits for no
thread.
"""
WRITE, HASH, READ = b"W", b"H", b"R"
_REQUEST = struct.Struct("=cqq")
"""Header of a request: the operation, a number, and how many 8-byte integers follow (file positions, sizes or
ranges).
"""
_INTEGER_BYTES = 8
_STATUS = struct.Struct("=i")
_DIGEST_BYTES, _HASH_BYTES = 16, 8


class ImageLost(HoldfastError):
    """The child ended, or has no image of the memory, so that nothing can be written."""


class CannotFork(ImageLost):
    """No child of this process would have an image."""


class ForkedImage:
    """The memory of one instant, in a child. Use it from one thread at a time; `close` ends the child.

    Args:
        pidfd: descriptor of the child, which cannot refer to a later process with the same number.
        connection: to the child.
        ranges: addresses of the memory.
    """

    def __init__(self, pid: int, pidfd: int, connection: socket.socket, ranges: Sequence[AddressRange]) -> None:
        self.pid, self._pidfd, self._connection, self._ranges = pid, pidfd, connection, ranges
        self._is_ready = self._is_closed = False
        self.changed_bytes = 0
        """Bytes of the memory that the parent had changed when the last file was written."""

    def write(self, fd: int, at: int, which: Sequence[int] | None = None) -> list[list[str]]:
        """Write ranges back to back from `at` on; return the digests of the chunks of each.

        Args:
            which: numbers of the ranges; by default all.

        Raises:
            ImageLost: the child was killed, or does not have the memory of this process.
            OSError: the file could not be written.
        """
        which = range(len(self._ranges)) if which is None else which
        counts = [-(-(end - start) // CHUNK_BYTES) for start, end in (self._ranges[each] for each in which)]
        reply = self._ask(WRITE, at, which, _DIGEST_BYTES * sum(counts), fd)
        chunks = iter(_digests(reply))
        return [[next(chunks) for _ in range(count)] for count in counts]

    def hash_leaves(self, leaf_bytes: Sequence[int], seed: int) -> tuple[list[list[str]], list[memoryview]]:
        """Return the digests of the chunks of each range, and the hashes of its leaves, of 8 bytes each.

        Args:
            leaf_bytes: size of the leaves of each range; the last one of a range may be shorter.
            seed: of the hash.

        Raises ImageLost.
        """
        sizes = [end - start for start, end in self._ranges]
        digest_bytes = [_DIGEST_BYTES * -(-size // CHUNK_BYTES) for size in sizes]
        hash_bytes = [_HASH_BYTES * -(-size // leaf) for size, leaf in zip(sizes, leaf_bytes, strict=True)]
        reply = self._ask(HASH, seed, leaf_bytes, sum(digest_bytes) + sum(hash_bytes))
        parts, at = list[memoryview](), 0
        for size in itertools.chain.from_iterable(zip(digest_bytes, hash_bytes, strict=True)):
            parts.append(reply[at : at + size])
            at += size
        return [_digests(each) for each in parts[::2]], parts[1::2]

    def read(self, number: int, parts: Sequence[tuple[int, int]]) -> memoryview:
        """Return the bytes of parts of range `number`. Raises ImageLost.

        Args:
            parts: where each part starts and ends in the range.
        """
        size_bytes = sum(end - start for start, end in parts)
        return self._ask(READ, number, [each for part in parts for each in part], size_bytes)

    def _ask(
        self, what: bytes, number: int, integers: Sequence[int], reply_bytes: int, fd: int | None = None
    ) -> memoryview:
        """Send a request, and return the reply once it is known that the child has the memory."""
        if not self._is_ready:
            self._receive(len(READY), time.monotonic() + READY_SECONDS)
            self._is_ready = True
        try:
            socket.send_fds(
                self._connection, [_REQUEST.pack(what, number, len(integers))], [] if fd is None else [fd]
            )
            self._connection.sendall(array.array("q", integers))
        except OSError as error:
            raise ImageLost(self._end()) from error
        reply = memoryview(self._receive(_STATUS.size + reply_bytes, None))
        self._check_memory()
        if failed := _STATUS.unpack_from(reply)[0]:
            raise OSError(failed, os.strerror(failed))
        return reply[_STATUS.size :]

    def close(self) -> None:
        """Kill and reap the child."""
        if self._is_closed:
            return
        self._is_closed = True
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):  # the script has reaped it, or ignores SIGCHLD
            os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED)
        os.close(self._pidfd)
        self._connection.close()

    def _receive(self, size_bytes: int, deadline: float | None) -> bytearray:
        """Receive a message of the child."""
        waiting = select.poll()
        for each in (self._connection, self._pidfd):
            waiting.register(each, select.POLLIN)
        found, at = bytearray(size_bytes), 0
        while at < size_bytes:
            left = None if deadline is None else 1000 * max(0.0, deadline - time.monotonic())
            if not (events := dict(waiting.poll(left))):
                raise CannotFork("the forked process did not begin: a fork handler of a library blocks it")
            count = 0
            if self._connection.fileno() in events:
                with contextlib.suppress(ConnectionError):
                    count = self._connection.recv_into(memoryview(found)[at:])
            if not count:
                raise ImageLost(self._end())
            at += count
        return found

    def _check_memory(self) -> None:
        try:
            is_whole, self.changed_bytes = inherited_image(self.pid, self._ranges)
        except OSError as error:
            raise ImageLost(f"the memory of the forked process cannot be checked: {error.strerror}") from error
        if not is_whole:
            raise CannotFork(
                "the forked process has no image of all arrays: some memory is shared, or kept from it"
            )

    def _end(self) -> str:
        """Wait for the exit status of the child, which follows the end of its descriptors, and describe it."""
        select.select([self._pidfd], [], [], END_SECONDS)
        with contextlib.suppress(ChildProcessError):
            ended = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None and ended.si_code != os.CLD_EXITED:
                return f"the forked process was killed by {signal.Signals(ended.si_status).name}"
        return "the forked process ended before it had written its memory"


def fork_image(views: Sequence[memoryview], ranges: Sequence[AddressRange]) -> ForkedImage:
    """Fork a child that has the memory as it is now.

    Raises:
        OSError: no memory or no process for a child, or a kernel before Linux 5.4.
        RuntimeError: the interpreter is exiting.
    """
    ours, theirs = socket.socketpair()
    theirs.settimeout(PARENT_POLL_SECONDS)
    parent, pidfd = os.getpid(), -1
    collects = gc.isenabled()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # the child keeps them blocked
    try:
        gc.disable()  # a finalizer of the script must not run in the child, nor a collection touch all pages
        _ignore_warning()
        pid = os.fork()
        if not pid:
            _serve(theirs, views, parent)
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            raise
    except BaseException:  # also on Ctrl-C: nobody would close it
        ours.close()
        raise
    finally:
        theirs.close()
        if collects:
            gc.enable()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return ForkedImage(pid, pidfd, ours, ranges)


def _digests(raw: memoryview) -> list[str]:
    return [raw[at : at + _DIGEST_BYTES].hex() for at in range(0, len(raw), _DIGEST_BYTES)]


def _ignore_warning() -> None:
    """Ignore the warning about threads for this module from now on.

    A filter for one call would remove filters that other threads set meanwhile.
    """
    module = re.escape(__name__)
    wanted = ("ignore", re.compile(_THREADS, re.IGNORECASE), DeprecationWarning, re.compile(module), 0)
    if wanted not in warnings.filters[:1]:  # another may have been put before it, which raises errors
        warnings.filterwarnings("ignore", _THREADS, DeprecationWarning, module)


def _serve(connection: socket.socket, views: Sequence[memoryview], parent: int) -> NoReturn:
    """Serve the requests of the parent, until it is gone or kills this process."""
    try:
        for name in os.listdir("/proc/self/fd"):  # first: a descriptor holds locks and connections of the parent
            if int(name) != connection.fileno():
                with contextlib.suppress(OSError):
                    os.close(int(name))
        _come_second()
        connection.sendall(READY)
        while os.getppid() == parent:
            try:
                request, fds, _, _ = socket.recv_fds(connection, _REQUEST.size, 1)
            except TimeoutError:
                continue
            if len(request) != _REQUEST.size:
                break
            connection.settimeout(None)
            what, number, count = _REQUEST.unpack(request)
            integers = _receive_integers(connection, count)
            if what == WRITE:
                status, digests = _write(fds[0], number, [views[each] for each in integers], parent)
                os.close(fds[0])
                connection.sendall(_STATUS.pack(status) + b"".join(digests))
            elif what == HASH:
                connection.sendall(_STATUS.pack(0))
                for view, leaf_bytes in zip(views, integers, strict=True):
                    _send_hashes(connection, view, leaf_bytes, number)
            else:
                connection.sendall(_STATUS.pack(0))
                for start, end in zip(integers[::2], integers[1::2], strict=True):
                    connection.sendall(views[number][start:end])
            connection.settimeout(PARENT_POLL_SECONDS)
    finally:
        os._exit(0)


def _receive_integers(connection: socket.socket, count: int) -> array.array[int]:
    data = bytearray()
    while len(data) < _INTEGER_BYTES * count:
        part = connection.recv(min(_INTEGER_BYTES * count - len(data), WRITE_BYTES))
        if not part:  # the parent is gone
            os._exit(0)
        data += part
    return array.array("q", bytes(data))


def _send_hashes(connection: socket.socket, view: memoryview, leaf_bytes: int, seed: int) -> None:
    """Send the digests of all chunks, and the hashes of all leaves, some thousand at once."""
    chunks = [view[start : start + CHUNK_BYTES] for start in range(0, len(view), CHUNK_BYTES)]
    connection.sendall(b"".join([bytes.fromhex(digest(each)) for each in chunks]))
    at_once = leaf_bytes * LEAVES_AT_ONCE
    for start in range(0, len(view), at_once):
        part = view[start : start + at_once]
        hashes = [
            xxhash.xxh3_64_digest(part[at : at + leaf_bytes], seed) for at in range(0, len(part), leaf_bytes)
        ]
        connection.sendall(b"".join(hashes))


def _write(fd: int, at: int, views: Sequence[memoryview], parent: int) -> tuple[int, list[bytes]]:
    """Write all memory; return the number of the error, or 0, and the digests of its chunks."""
    digests, status = [], 0
    for view in views:
        for start in range(0, len(view), CHUNK_BYTES):
            chunk = rest = view[start : start + CHUNK_BYTES]
            while len(rest) and not status:
                if os.getppid() != parent:
                    os._exit(0)
                try:
                    count = os.pwritev(fd, [rest[:WRITE_BYTES]], at)
                except OSError as error:
                    count, status = 0, error.errno or errno.EIO
                else:
                    status = 0 if count else errno.EIO
                rest, at = rest[count:], at + count
            if status:
                return status, [bytes(_DIGEST_BYTES)] * sum(-(-len(each) // CHUNK_BYTES) for each in views)
            digests.append(bytes.fromhex(digest(chunk)))  # the same pages: nothing changes them in this process
    return status, digests


def _come_second() -> None:
    """Lower the CPU priority and raise the OOM score of this process."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, max(NICENESS, os.getpriority(os.PRIO_PROCESS, 0)))
    with contextlib.suppress(OSError):
        fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
        os.write(fd, b"%d" % HELPER_OOM_SCORE)
        os.close(fd)
