"""Bounded pools of threads: work is done, its errors are raised, and a busy pool does not delay the caller."""

import collections
import contextlib
import errno
import os
import threading

import pytest

from holdfast.system import io_pool


@pytest.fixture
def fresh_pools(monkeypatch):
    for in_background in (True, False):
        monkeypatch.setitem(io_pool._pools, in_background, io_pool._new_pool(in_background))


def niceness():
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_work_is_shared_until_all_of_it_is_done():
    work, done = collections.deque(range(1000)), []

    def drain():
        with contextlib.suppress(IndexError):
            while True:
                done.append(work.popleft())

    io_pool.share(drain, 4)
    assert sorted(done) == list(range(1000))


def test_what_a_helper_raises_is_raised():
    here, failed = threading.get_ident(), threading.Event()

    def fail_elsewhere():
        if threading.get_ident() == here:
            assert failed.wait(300)
        else:
            failed.set()
            raise OSError(errno.EIO, "elsewhere")

    with pytest.raises(OSError, match="elsewhere"):
        io_pool.share(fail_elsewhere, 2)


def test_where_no_thread_can_be_started_the_caller_does_it_all(fresh_pools, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    done = []
    io_pool.share(lambda: done.append(threading.get_ident()), 4)
    assert set(done) == {threading.get_ident()}
    assert io_pool.submit(lambda: 1).result() == 1


def test_a_busy_pool_delays_no_caller_and_never_has_more_threads(fresh_pools):
    go, names, done = threading.Event(), [], []

    def hold_up():
        names.append(threading.current_thread().name)
        assert go.wait(300)

    def share_in_background():
        io_pool.lower_cpu_priority()
        io_pool.share(lambda: done.append(1), 4)

    busy = [io_pool.submit(hold_up) for _ in range(3 * io_pool.THREADS)]
    background = threading.Thread(target=share_in_background)
    background.start()
    background.join(300)
    assert done == [1]
    go.set()
    for each in busy:
        each.result(300)
    assert set(names) <= {f"holdfast-io-{number}" for number in range(io_pool.THREADS)}


def test_background_work_has_a_lowered_priority():
    assert io_pool.submit(niceness).result(300) >= io_pool.NICENESS


def test_helpers_have_the_priority_of_the_thread_that_waits_for_them():
    found, own = {}, niceness()

    def note(thread):
        (helper,) = io_pool.submit_helpers(lambda: found.setdefault(thread, niceness()), 1)
        helper.result(300)

    def from_background():
        io_pool.lower_cpu_priority()
        note("background")

    note("training")
    background = threading.Thread(target=from_background)
    background.start()
    background.join(300)
    assert found == {"training": own, "background": max(own, io_pool.NICENESS)}


def test_a_forked_child_has_pools_of_its_own():
    io_pool.submit(lambda: None).result(300)
    if (child := os.fork()) == 0:
        os._exit(io_pool.submit(lambda: 7).result(300))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
