import pytest

from holdfast.checkpoint.reading import MIN_BYTES_PER_SECOND, RateLimiter
from tests.support.clock import FakeClock

MB = 1_000_000


def test_bytes_go_at_the_rate_that_was_asked_for():
    clock = FakeClock(100.0)
    pacer = RateLimiter(50 * MB, clock.wait, clock)
    for _ in range(11):
        pacer(5 * MB)
    assert clock.now == pytest.approx(101.0)  # the eleventh begins when ten are paid for


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
