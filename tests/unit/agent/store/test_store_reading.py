import contextlib
import errno
import mmap
import os
import random
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import DamagedCheckpoint
from holdfast.format.manifest import BLOCK_BYTES
from holdfast.store import local_reader
from holdfast.store.local_reader import LocalReader
from holdfast.system import files
from holdfast.system.files import Files
from tests.support.simulated_files import CacheFiles, FailingFiles, ShortFiles

SIZE = 20 * BLOCK_BYTES + 77


@pytest.fixture(autouse=True)
def small_stretches(monkeypatch):
    monkeypatch.setattr(local_reader, "DIRECT_BYTES", BLOCK_BYTES)


@pytest.fixture(scope="module")
def data():
    return random.Random(1).randbytes(SIZE)


@pytest.fixture(scope="module")
def path(data):
    with tempfile.TemporaryDirectory() as directory:
        yield write(Path(directory, "file"), data)


def write(path, data):
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return path


def forget(path):
    with open(path, "rb") as file:
        Files().forget(file.fileno())


def is_cached(path):
    with open(path, "rb") as file:
        return files.is_cached(file.fileno(), 0, SIZE)


@pytest.fixture
def on_disk(tmp_path, data):
    """A file that is not in the page cache, and that nothing is just being read from."""
    path = write(tmp_path / "file", data)
    forget(path)
    if is_cached(path):
        pytest.skip("the directory for tests is in memory")
    return path


def stretch(size_bytes, aside=0):
    """Memory that begins so many bytes after a page does."""
    return memoryview(mmap.mmap(-1, size_bytes + aside + 1))[aside : aside + size_bytes]


KINDS = {
    "plain": Files(),
    "no direct I/O": CacheFiles(says_so=True),
    "no direct I/O, and does not say so": CacheFiles(says_so=False),
    "piecemeal": ShortFiles(1000),
    "block by block": ShortFiles(BLOCK_BYTES),
}


@settings(deadline=None, max_examples=200)
@given(
    start=st.integers(0, SIZE),
    size=st.integers(0, SIZE),
    aside=st.sampled_from(["as in the file", 0, 1]),
    kind=st.sampled_from(list(KINDS)),
    cold=st.booleans(),
    from_disk=st.booleans(),
)
def test_any_stretch_is_read_as_it_is(path, data, start, size, aside, kind, cold, from_disk):
    size = min(size, SIZE - start)
    target = stretch(size, start % BLOCK_BYTES if aside == "as in the file" else aside)
    if cold:
        forget(path)
    with LocalReader(KINDS[kind], path, from_disk=from_disk) as reader:
        assert reader.size_bytes == SIZE
        reader.read_into(start, target)
    assert target == data[start : start + size]


def test_a_file_that_is_not_cached_is_read_past_the_cache(on_disk, data):
    target = stretch(SIZE)
    with LocalReader(Files(), on_disk) as reader:
        reader.read_into(0, target)
    assert target == data
    assert not is_cached(on_disk)


class CountingFiles(Files):
    def __init__(self):
        self.direct, self.direct_reads = set(), 0

    def set_direct(self, fd, direct):
        self.direct.add(fd)
        return super().set_direct(fd, direct)

    def read(self, fd, target, at):
        self.direct_reads += fd in self.direct
        return super().read(fd, target, at)


def test_a_cached_file_is_read_out_of_the_cache(on_disk, data):
    on_disk.read_bytes()
    target, files = stretch(SIZE), CountingFiles()
    with LocalReader(files, on_disk) as reader:
        reader.read_into(0, target)
    assert (target, files.direct_reads) == (data, 0)
    assert is_cached(on_disk)


def test_from_disk_a_cached_file_is_read_again(on_disk, data):
    on_disk.read_bytes()
    target = stretch(SIZE)
    with LocalReader(Files(), on_disk, from_disk=True) as reader:
        reader.read_into(0, target)
    assert target == data
    assert not is_cached(on_disk)


def test_from_disk_not_even_pages_that_the_cache_cannot_drop_are_used(on_disk, data):
    with open(on_disk, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as held:
        assert bytes(held) == data
        target, files = stretch(SIZE), CountingFiles()
        with LocalReader(files, on_disk, from_disk=True) as reader:
            reader.read_into(0, target)
        assert is_cached(on_disk)
    assert target == data
    assert files.direct_reads > 0


def test_direct_io_that_is_refused_is_not_tried_again(on_disk):
    files = CacheFiles(says_so=False)
    with LocalReader(files, on_disk, from_disk=True) as reader:
        for _ in range(3):
            reader.read_into(0, stretch(SIZE))
    assert files.refused == 1


def test_threads_read_at_the_same_time(path, data):
    parts = [(start, stretch(BLOCK_BYTES)) for start in range(0, SIZE - BLOCK_BYTES, BLOCK_BYTES)]
    with LocalReader(Files(), path) as reader:
        threads = [threading.Thread(target=reader.read_into, args=part) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert b"".join(target for _, target in parts) == data[: len(parts) * BLOCK_BYTES]


@pytest.mark.parametrize("from_disk", [False, True])
def test_the_end_of_a_file_that_is_cut_short_is_named(path, from_disk):
    with LocalReader(Files(), path, from_disk=from_disk) as reader, pytest.raises(DamagedCheckpoint) as caught:
        reader.read_into(BLOCK_BYTES, stretch(SIZE))
    assert caught.value.reason == f"ends at byte {SIZE:,}"


@pytest.mark.parametrize("error", [errno.EIO, errno.ENODATA, errno.EUCLEAN])
def test_what_the_device_cannot_read_is_damaged(path, error):
    with LocalReader(FailingFiles(("read",), 1, error), path) as reader:
        with pytest.raises(DamagedCheckpoint, match=os.strerror(error)):
            reader.read_into(0, stretch(SIZE))
        reader.read_into(0, stretch(SIZE))


@pytest.mark.parametrize("error", [errno.EMFILE, errno.EACCES, errno.ESTALE, errno.ENOMEM])
def test_what_cannot_be_reached_is_not_called_damaged(path, error):
    for call in ("open", "read"):
        with pytest.raises(OSError, match=os.strerror(error)) as caught:
            read_all(FailingFiles((call,), 1, error), path)
        assert caught.value.filename == str(path)


def read_all(files, path):
    with LocalReader(files, path) as reader:
        reader.read_into(0, stretch(SIZE))


def open_files():
    return len(os.listdir("/proc/self/fd"))


def test_nothing_stays_open(path):
    before = open_files()
    read_all(Files(), path)
    for nth in (1, 2):
        with contextlib.suppress(OSError):
            LocalReader(FailingFiles(("open",), nth, errno.EMFILE), path)
    with contextlib.suppress(OSError):
        LocalReader(FailingFiles(("forget",), 1, errno.ESTALE), path, from_disk=True)
    assert open_files() == before
