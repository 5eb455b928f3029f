"""A forked child writes the memory of the instant of the fork, whatever becomes of both processes."""

import contextlib
import ctypes
import errno
import fcntl
import gc
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import warnings
import weakref

import numpy as np
import pytest
import torch
import xxhash

from holdfast.format.manifest import CHUNK_BYTES, digest
from holdfast.save import forked_image
from holdfast.save.forked_image import ImageLost, fork_image
from holdfast.system.host_memory import bytes_of
from holdfast.system.memory_maps import are_inherited, inherited_image
from tests.support.process_inspection import children

MADV_DONTFORK, MADV_WIPEONFORK = 10, 18
SIZE = 6 << 20


def range_of(array):
    return array.ctypes.data, array.ctypes.data + array.nbytes


@contextlib.contextmanager
def image_of(*arrays):
    image = fork_image([bytes_of(torch.from_numpy(each)) for each in arrays], [range_of(each) for each in arrays])
    try:
        yield image
    finally:
        image.close()


@pytest.fixture
def file(tmp_path):
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


def array_of(size_bytes=SIZE, seed=0):
    return np.random.default_rng(seed).integers(0, 256, size_bytes, dtype=np.uint8)


def private_memory(advice=None):
    memory = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if advice is not None:
        memory.madvise(advice)
    return np.frombuffer(memory, np.uint8)


def test_it_writes_the_instant_of_the_fork(file):
    array, other = array_of(CHUNK_BYTES + 12_345), array_of(5_000, 1)
    before, others = array.tobytes(), other.tobytes()
    with image_of(array, other) as image:
        array[:] = 1
        del other
        found = image.write(file, 100)
    assert os.pread(file, len(before), 100) == before
    assert os.pread(file, 10_000, 100 + len(before)) == others
    assert found == [[digest(before[:CHUNK_BYTES]), digest(before[CHUNK_BYTES:])], [digest(others)]]


def test_it_hashes_and_gives_parts_of_the_instant_of_the_fork(file):
    array, other = array_of(CHUNK_BYTES + 12_345), array_of(5_000, 1)
    before, others = array.tobytes(), other.tobytes()
    with image_of(array, other) as image:
        array[:] = 1
        digests, hashes = image.hash_leaves([4096, 1000], 7)
        parts = image.read(0, [(0, 10), (CHUNK_BYTES - 5, CHUNK_BYTES + 5)])
        found = image.write(file, 0, [1])
    assert digests == [[digest(before[:CHUNK_BYTES]), digest(before[CHUNK_BYTES:])], [digest(others)]]
    leaves = [before[at : at + 4096] for at in range(0, len(before), 4096)]
    assert bytes(hashes[0]) == b"".join(xxhash.xxh3_64_digest(each, 7) for each in leaves)
    assert len(hashes[1]) == 5 * 8
    assert bytes(parts) == before[:10] + before[CHUNK_BYTES - 5 : CHUNK_BYTES + 5]
    assert (os.pread(file, 10_000, 0), found) == (others, [[digest(others)]])


def test_it_writes_as_often_as_it_is_asked(file, tmp_path):
    array = array_of()
    with image_of(array) as image:
        first = image.write(file, 0)
        with open("/dev/full", "wb") as full, pytest.raises(OSError, match="No space") as error:
            image.write(full.fileno(), 0)
        assert error.value.errno == errno.ENOSPC
        with open(tmp_path / "again", "wb") as again:
            assert image.write(again.fileno(), 0) == first
    assert (tmp_path / "again").read_bytes() == array.tobytes()


def test_it_counts_what_changed_meanwhile(file):
    array = array_of(32 << 20)
    with image_of(array) as image:
        array[: 8 << 20] = 0
        image.write(file, 0)
        assert 8 << 20 <= image.changed_bytes <= 12 << 20  # and huge pages at both ends


def test_it_counts_no_other_memory_that_changed(file):
    memory = array_of(32 << 20)  # one mapping of the kernel
    with image_of(memory[8 << 20 : 12 << 20]) as image:
        memory[12 << 20 :] = 0
        image.write(file, 0)
        assert image.changed_bytes <= 2 << 20  # a huge page at its end


@pytest.mark.parametrize("moment", ["before it begins", "before it writes", "between two writes"])
def test_a_killed_child_is_named_and_reaped(file, moment):
    with image_of(array_of()) as image:
        if moment == "between two writes":
            image.write(file, 0)
        elif moment == "before it writes":
            image._receive(1, None)
            image._is_ready = True
        os.kill(image.pid, signal.SIGKILL)
        with pytest.raises(ImageLost, match="killed by SIGKILL"):
            image.write(file, 0)
        with pytest.raises(ImageLost):
            image.write(file, 0)
    assert image.pid not in children()


def test_a_child_that_a_script_reaped_is_no_other_process(file):
    with image_of(array_of()) as image:
        os.kill(image.pid, signal.SIGKILL)
        os.waitpid(image.pid, 0)
        with pytest.raises(ImageLost):
            image.write(file, 0)


def test_a_child_that_does_not_begin_is_given_up(file, monkeypatch):
    monkeypatch.setattr(forked_image, "READY_SECONDS", 0.0)
    with image_of(array_of()) as image:
        os.kill(image.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, image.pid, os.WSTOPPED)
        with contextlib.suppress(BlockingIOError):
            image._connection.recv(1, socket.MSG_DONTWAIT)  # where it began before it was stopped
        with pytest.raises(ImageLost, match="did not begin"):
            image.write(file, 0)
    assert image.pid not in children()


def test_closing_ends_a_child_that_is_stopped():
    with image_of(array_of()) as image:
        os.kill(image.pid, signal.SIGSTOP)
        image.close()
        image.close()
    assert image.pid not in children()


PARENT = """
import os, sys, signal, time
import numpy as np, torch
from holdfast.save.forked_image import fork_image
from holdfast.system.host_memory import bytes_of

array = np.ones(64 << 20, np.uint8)
image = fork_image([bytes_of(torch.from_numpy(array))], [(array.ctypes.data, array.ctypes.data + array.nbytes)])
fd = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT)
if sys.argv[1] == "writing":
    image.write(fd, 0)
    os.kill(image.pid, signal.SIGSTOP)
    import socket, struct
    socket.send_fds(image._connection, [struct.pack("=q", 0)], [fd])
print(image.pid, flush=True)
signal.pause()
"""


@pytest.mark.parametrize("moment", ["idle", "writing"])
def test_no_child_outlives_a_killed_parent(tmp_path, moment):
    file = tmp_path / "file"
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, moment, file], stdout=subprocess.PIPE, text=True
    ) as parent:
        pid = int(parent.stdout.readline())
        pidfd = os.pidfd_open(pid)
        parent.kill()
        parent.wait()
        if moment == "writing":
            file.write_bytes(b"")  # the stopped child writes nothing more once its parent is gone
            signal.pidfd_send_signal(pidfd, signal.SIGCONT)
        assert select.select([pidfd], [], [], 60)[0], "the child is still there"
        os.close(pidfd)
        if moment == "writing":
            assert not file.read_bytes()


def test_it_holds_no_lock_and_no_descriptor_of_the_parent(file, tmp_path):
    with open(tmp_path / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with image_of(array_of()) as image:
            image.write(file, 0)
            assert len(os.listdir(f"/proc/{image.pid}/fd")) == 1
            lock.close()
            with open(tmp_path / "lock", "w") as other:
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_signals_of_a_group_do_not_end_it(file):
    with image_of(array_of()) as image:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            os.kill(image.pid, number)
        image.write(file, 0)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()


def test_no_finalizer_runs_in_the_child(file, tmp_path):
    class Cycle:
        def __init__(self):
            self.me = self

    made = Cycle()
    weakref.finalize(made, (tmp_path / f"finalized-{os.getpid()}").touch)
    was_enabled, parent = gc.isenabled(), os.getpid()
    weakref.finalize(made, lambda: os.getpid() != parent and (tmp_path / "in-child").touch())
    del made
    with image_of(array_of()) as image:
        image.write(file, 0)
    gc.collect()
    assert gc.isenabled() == was_enabled
    assert not (tmp_path / "in-child").exists()


def test_the_warning_about_threads_is_silent_for_this_call(monkeypatch, file):
    fork = os.fork

    def warn():
        pid = fork()
        if pid:
            warnings.warn("This process (pid=7) is multi-threaded, use", DeprecationWarning, stacklevel=2)
        return pid

    monkeypatch.setattr(os, "fork", warn)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with image_of(array_of()) as image:
            image.write(file, 0)
        filters = list(warnings.filters)
        with image_of(array_of()):
            assert warnings.filters == filters
        with pytest.raises(DeprecationWarning):
            warnings.warn("This process (pid=7) is multi-threaded", DeprecationWarning, stacklevel=1)


@pytest.mark.parametrize("error", [OSError(errno.ENOMEM, "Cannot allocate memory"), RuntimeError("exiting")])
def test_a_failed_fork_leaves_nothing(monkeypatch, error):
    def fail():
        raise error

    monkeypatch.setattr(os, "fork", fail)
    before, mask = len(os.listdir("/proc/self/fd")), signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with pytest.raises(type(error)), image_of(array_of()):
        pass
    assert len(os.listdir("/proc/self/fd")) == before
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == mask
    assert gc.isenabled()


def test_a_kernel_without_descriptors_of_processes_leaves_no_child(monkeypatch):
    def fail(pid):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", fail)
    before = set(children())
    with pytest.raises(OSError, match="not implemented"), image_of(array_of()):
        pass
    assert set(children()) <= before


def test_what_a_child_inherits(tmp_path):
    shared = torch.empty(SIZE, dtype=torch.uint8).share_memory_().numpy()
    (tmp_path / "file").write_bytes(bytes(SIZE))
    mapped = {mode: np.memmap(tmp_path / "file", np.uint8, mode) for mode in ("r+", "c")}
    anonymous = np.frombuffer(mmap.mmap(-1, SIZE), np.uint8)
    private, small = private_memory(), np.ones(100, np.uint8)
    arrays = [shared, mapped["r+"], mapped["c"], anonymous, private, small, array_of()]
    assert are_inherited([range_of(each) for each in arrays]) == [False, False, False, False, True, True, True]
    start, end = range_of(private)
    assert are_inherited([(start, end + (1 << 40)), (8, 16)]) == [False, False]


@pytest.mark.parametrize("advice", [MADV_DONTFORK, MADV_WIPEONFORK])
def test_memory_that_is_kept_from_a_child_is_never_written_as_its_own(file, advice):
    array = private_memory(advice)
    ctypes.memset(array.ctypes.data, 7, SIZE)
    with image_of(array) as image, pytest.raises(ImageLost, match=r"no image|killed by"):
        image.write(file, 0)
    with image_of(array) as image:
        assert not inherited_image(image.pid, [range_of(array)])[0]


def test_forks_beside_busy_threads(file):
    """Threads that allocate and compute hold locks at any moment; the child needs none of them."""
    array, ends = array_of(), threading.Event()

    def allocate():
        while not ends.is_set():
            [bytearray(size) for size in range(1, 200_000, 5_000)]
            torch.ones(300, 300) @ torch.ones(300, 300)

    threads = [threading.Thread(target=allocate) for _ in range(3)]
    for each in threads:
        each.start()
    try:
        for number in range(20):
            array[:100] = number
            with image_of(array) as image:
                array[:100] = 255
                image.write(file, 0)
            assert os.pread(file, 100, 0) == bytes([number]) * 100
    finally:
        ends.set()
        for each in threads:
            each.join()
