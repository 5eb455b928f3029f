import threading

import pytest

from holdfast.persist.writer import MIN_BYTES_PER_SECOND, RateLimiter
from tests.support.clock import FakeClock

MB = 1_000_000


def test_bytes_go_at_the_rate_that_was_asked_for():
    clock = FakeClock(100.0)
    pacer = RateLimiter(50 * MB, clock.wait, clock)
    for _ in range(11):
        pacer(5 * MB)
    assert clock.now == pytest.approx(101.0)  # the eleventh begins when ten are paid for


def test_without_a_rate_nothing_waits():
    clock = FakeClock(100.0)
    pacer = RateLimiter(None, clock.wait, clock)
    pacer(10**12)
    pacer(10**12)
    assert clock.now == 100.0


def test_no_rate_is_so_low_that_a_checkpoint_never_ends():
    clock = FakeClock(100.0)
    pacer = RateLimiter(0.0, clock.wait, clock)
    pacer(MB)
    pacer(MB)
    assert clock.now == 100.0 + MB / MIN_BYTES_PER_SECOND


def test_a_slow_device_has_nothing_to_catch_up_with():
    clock = FakeClock(100.0)
    pacer = RateLimiter(10 * MB, clock.wait, clock)
    pacer(10 * MB)
    clock.now += 60
    pacer(10 * MB)
    pacer(10 * MB)
    assert clock.now == 161.0


def test_once_lifted_it_stays_so():
    clock = FakeClock(100.0, wait_ends_at=102.0)
    pacer = RateLimiter(MB, clock.wait, clock)
    for _ in range(10):
        pacer(MB)
    assert clock.now == 102.0


def test_threads_share_one_rate():
    lock, waits = threading.Lock(), []

    def wait(seconds):
        with lock:
            waits.append(seconds)
        return False

    pacer = RateLimiter(MB, wait, lambda: 0.0)
    threads = [threading.Thread(target=pacer, args=(MB,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(waits) == [1.0, 2.0, 3.0]
