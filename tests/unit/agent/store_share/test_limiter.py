"""The limit of a job's writes, on a clock of the tests."""

from __future__ import annotations

import math

import pytest

from holdfast.store_share.limiter import RateLimit


class Clock:
    """A clock that waits advance."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


def test_bytes_take_the_time_of_the_rate() -> None:
    clock = Clock()
    limit = RateLimit(lambda: 100e3, clock.wait, clock)
    for _ in range(3):
        limit.take(50_000, lambda: False)
    assert clock.now == pytest.approx(1.5)


def test_idle_time_is_not_saved_up() -> None:
    clock = Clock()
    limit = RateLimit(lambda: 100e3, clock.wait, clock)
    clock.now = 1000.0
    limit.restart()
    limit.take(100_000, lambda: False)
    assert clock.now == pytest.approx(1001.0)


def test_the_time_of_the_writes_themselves_counts() -> None:
    clock = Clock()
    limit = RateLimit(lambda: 100e3, clock.wait, clock)
    limit.restart()
    for _ in range(10):
        limit.take(100_000, lambda: False)
        clock.now += 0.9  # the disk writes them
    assert clock.now == pytest.approx(10.9)


def test_a_new_rate_applies_to_a_write_under_way() -> None:
    clock = Clock()
    limit = RateLimit(lambda: 10e3 if clock.now < 1.0 else 1000e3, clock.wait, clock)
    limit.take(1_010_000, lambda: False)
    assert clock.now == pytest.approx(2.0, abs=0.2)


def test_a_limit_that_is_lifted_lets_the_rest_pass() -> None:
    clock = Clock()
    limit = RateLimit(lambda: 1024.0, clock.wait, clock)
    limit.take(10**12, lambda: clock.now >= 2.0)
    assert clock.now == pytest.approx(2.0, abs=0.1)


def test_without_a_limit_nothing_waits() -> None:
    clock = Clock()
    RateLimit(lambda: math.inf, clock.wait, clock).take(10**15, lambda: False)
    assert clock.now == 0.0


def test_a_rate_of_nothing_does_not_block_for_ever() -> None:
    clock = Clock()
    RateLimit(lambda: 0.0, clock.wait, clock).take(1024, lambda: False)
    assert clock.now == pytest.approx(1.0)
