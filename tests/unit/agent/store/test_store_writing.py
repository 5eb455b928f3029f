import ctypes
import errno
import mmap
import os
import random
import tempfile
import threading
import types
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.format.manifest import BLOCK_BYTES
from holdfast.store import local_writer
from holdfast.store.local_writer import Volume, write_durably
from holdfast.system import files
from holdfast.system.files import Files
from tests.support.simulated_files import CacheFiles, FailingFiles, ShortFiles

WRITE_BYTES = 2 * BLOCK_BYTES


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """So that a file of some pages takes every turn that one of a gigabyte takes."""
    monkeypatch.setattr(local_writer, "WRITE_BYTES", WRITE_BYTES)
    monkeypatch.setattr(local_writer, "DIRECT_BYTES", BLOCK_BYTES)
    monkeypatch.setattr(local_writer, "SHARED_BYTES", BLOCK_BYTES)


def pages(size_bytes, *, aside=0):
    """Random bytes in writable memory that begins so many bytes after a page does."""
    memory = memoryview(mmap.mmap(-1, size_bytes + aside + 1))[aside : aside + size_bytes]
    memory[:] = random.Random(size_bytes).randbytes(size_bytes)
    return memory


def written(path, parts, files=None, **options):
    """What is in a file that was written from these parts, which is then removed."""
    write_durably(files or Files(), path, parts, options.pop("volume", None) or Volume(), **options)
    data = path.read_bytes()
    path.unlink()
    return data


PLACES = [place for place in ("/tmp", "/dev/shm", "/var/tmp") if os.path.isdir(place)]
AROUND_BLOCKS = st.one_of(
    st.integers(0, 3 * WRITE_BYTES),
    st.builds(lambda n, off: max(0, n * BLOCK_BYTES + off), st.integers(0, 7), st.integers(-1, 1)),
)
PARTS = st.lists(
    st.one_of(
        st.builds(lambda size: bytes(pages(size)), AROUND_BLOCKS),
        st.builds(lambda size, aside: pages(size, aside=aside), AROUND_BLOCKS, st.sampled_from([0, 0, 1, 512])),
    ),
    max_size=5,
)


@settings(deadline=None, max_examples=150)
@given(PARTS, st.sampled_from(PLACES), st.sampled_from([None, "says so", "refuses"]))
def test_what_is_written_is_what_was_given(parts, place, without_direct):
    files = CacheFiles(says_so=without_direct == "says so") if without_direct else Files()
    with tempfile.TemporaryDirectory(dir=place) as directory:
        data = written(Path(directory, "file"), parts, files)
    assert data == b"".join(parts)


@settings(deadline=None, max_examples=60)
@given(PARTS, st.sampled_from([1, 511, BLOCK_BYTES, BLOCK_BYTES + 1, WRITE_BYTES]))
def test_a_system_that_takes_less_than_it_is_given_gets_the_rest_again(parts, most_bytes):
    with tempfile.TemporaryDirectory() as directory:
        assert written(Path(directory, "file"), parts, ShortFiles(most_bytes)) == b"".join(parts)


@given(PARTS)
def test_blocks_lie_side_by_side_none_across_a_multiple_of_their_size_and_whole_pages_go_straight(parts):
    at = 0
    for block in local_writer.cut(parts):
        assert (block.at, block.at % BLOCK_BYTES) == (at, 0)
        assert 0 < block.size_bytes <= WRITE_BYTES - at % WRITE_BYTES
        if block.straight:
            assert local_writer.address(block.views[0]) % BLOCK_BYTES == block.size_bytes % BLOCK_BYTES == 0
        at += block.size_bytes
    assert at == sum(map(len, parts))


def test_of_a_padded_header_and_an_arena_only_the_header_and_the_tail_are_copied():
    header, arena = b"h" * BLOCK_BYTES, pages(5 * BLOCK_BYTES + 10)
    found = [
        (block.at // BLOCK_BYTES, block.size_bytes, block.straight) for block in local_writer.cut([header, arena])
    ]
    assert found == [
        (0, BLOCK_BYTES, False),
        (1, BLOCK_BYTES, True),
        (2, WRITE_BYTES, True),
        (4, WRITE_BYTES, True),
        (6, 10, False),
    ]


def cached(path):
    with open(path, "rb") as file:
        return files.is_cached(file.fileno(), 0, os.fstat(file.fileno()).st_size)


@pytest.fixture
def disk(tmp_path):
    """A directory on a file system that can do without the page cache."""
    path = tmp_path / "probe"
    fd = Files().create(path)
    os.write(fd, bytes(BLOCK_BYTES))
    os.fsync(fd)
    Files().forget(fd)
    os.close(fd)
    if cached(path):
        pytest.skip("the directory for tests is in memory")
    return tmp_path


@pytest.mark.parametrize("files", [Files(), CacheFiles(says_so=True)], ids=["direct", "through the cache"])
def test_what_is_written_does_not_stay_in_the_page_cache(disk, files):
    path = disk / "file"
    write_durably(files, path, [b"h" * BLOCK_BYTES, pages(12 * WRITE_BYTES)], Volume())
    assert not cached(path)


def test_a_file_system_that_refuses_direct_io_is_asked_once(tmp_path):
    files, volume, data = CacheFiles(says_so=False), Volume(), pages(8 * WRITE_BYTES)
    assert written(tmp_path / "file", [data], files, volume=volume) == data
    assert files.refused == 1
    assert written(tmp_path / "file", [data], files, volume=volume) == data
    assert files.refused == 1


@pytest.mark.parametrize("aside", [0, 1, 512])
def test_memory_that_does_not_lie_in_pages_is_written_directly_too(disk, aside):
    volume, data = Volume(), pages(8 * WRITE_BYTES + 10, aside=aside)
    assert written(disk / "file", [b"header", data], volume=volume) == b"header" + data
    assert volume.direct


class CutShortFiles(Files):
    """Once, it writes less than it is given, and not whole blocks."""

    cut_short = False

    def write(self, fd, data, at):
        count = super().write(fd, data, at)
        if self.cut_short or count <= 5000:
            return count
        self.cut_short = True
        return 5000


def test_a_write_that_is_cut_short_within_a_block_is_not_held_against_direct_io(disk):
    files, volume, data = CutShortFiles(), Volume(), pages(8 * WRITE_BYTES)
    assert written(disk / "file", [data], files, volume=volume) == data
    assert (files.cut_short, volume.direct) == (True, True)


def test_an_error_of_close_is_an_error(tmp_path):
    for size in (10, 8 * WRITE_BYTES):
        path = tmp_path / str(size)
        with pytest.raises(OSError, match="Disk quota exceeded") as caught:
            write_durably(FailingFiles(("close",), 1, errno.EDQUOT), path, [pages(size)], Volume())
        assert caught.value.filename == str(path)


def test_memory_that_a_device_cannot_take_from_goes_through_the_cache(tmp_path):
    data = pages(8 * WRITE_BYTES)
    assert written(tmp_path / "file", [data], FailingFiles(("write",), 3, errno.EFAULT)) == data


def test_where_blocks_cannot_be_reserved_the_file_is_written_all_the_same(tmp_path, monkeypatch):
    def declined(*_):
        ctypes.set_errno(errno.EOPNOTSUPP)
        return -1

    monkeypatch.setattr(files, "_libc", types.SimpleNamespace(fallocate=declined))
    assert written(tmp_path / "file", [pages(5000)]) == pages(5000)


def test_a_full_disk_shows_before_the_time_is_spent(tmp_path):
    path = tmp_path / "file"
    with pytest.raises(OSError, match="No space left") as caught:
        write_durably(FailingFiles(("reserve",), 1, errno.ENOSPC), path, [pages(5000)], Volume())
    assert (caught.value.filename, path.stat().st_size) == (str(path), 0)


def test_a_file_system_that_takes_nothing_is_not_asked_for_ever(tmp_path):
    with pytest.raises(OSError, match="accepts no more bytes"):
        write_durably(ShortFiles(0), tmp_path / "file", [b"data"], Volume())


def test_every_block_is_paced_by_the_thread_that_writes_it(tmp_path):
    calls, threads = [], {threading.current_thread().name}
    parts = [b"h" * BLOCK_BYTES, pages(5 * WRITE_BYTES + 10)]
    pace = lambda size: calls.append((size, threading.current_thread().name))  # noqa: E731
    written(tmp_path / "file", parts, pace=pace)
    assert sum(size for size, _ in calls) == sum(map(len, parts))
    assert all(name in threads or name.startswith("holdfast-load-") for _, name in calls)


def test_a_large_file_is_written_by_two_threads_at_once(disk):
    together = threading.Barrier(local_writer.WRITERS, timeout=300)  # it breaks unless so many write at once
    written(disk / "file", [pages(4 * WRITE_BYTES)], pace=lambda _: together.wait())


@pytest.mark.parametrize("nth", range(1, 9))
def test_an_error_on_any_thread_ends_all_and_is_raised(tmp_path, nth):
    files = FailingFiles(("write",), nth, errno.ENOSPC)
    with pytest.raises(OSError, match="No space left") as caught:
        write_durably(files, tmp_path / "file", [pages(8 * WRITE_BYTES)], Volume())
    assert caught.value.filename == str(tmp_path / "file")
    (tmp_path / "file").unlink()


def test_after_a_block_that_fails_no_thread_begins_another(tmp_path):
    files = FailingFiles(("write",), 3, errno.EIO)
    fd = files.create(tmp_path / "file")
    work = local_writer._DurableWrite(files, fd, [pages(8 * WRITE_BYTES)], Volume(), None)
    with pytest.raises(OSError, match="Input/output error"):
        work._drain()
    work._drain()
    files.close(fd)
    assert (tmp_path / "file").stat().st_size == 2 * WRITE_BYTES
