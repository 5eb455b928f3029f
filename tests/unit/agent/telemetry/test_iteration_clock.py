"""What an iteration is made of, on a clock of its own."""

import pytest

from holdfast.telemetry.iteration_clock import IterationClock


class Hands:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def pass_seconds(self, seconds):
        self.now += seconds


def test_waits_update_and_the_rest_sum_to_wall_time():
    hands = Hands()
    clock = IterationClock(hands)
    clock.begin()
    began, found = hands.now, []
    for number in range(1, 101):
        waits = {"data_fetch": 0.03 * (number % 3), "snapshot_wait": 0.005 * (number % 7 == 0)}
        for kind, seconds in waits.items():
            hands.pass_seconds(seconds)
            clock.stall(kind, seconds)
        hands.pass_seconds(0.05)  # forward and backward
        clock.update_begins()
        hands.pass_seconds(0.01)
        clock.update_ends()
        found.append(clock.end(number, 1))
    assert sum(each.seconds for each in found) == pytest.approx(hands.now - began)
    for each in found:
        assert each.seconds - each.data_seconds - each.checkpoint_stall_seconds == pytest.approx(0.06)
        assert each.update_seconds == pytest.approx(0.01)


def test_a_restore_is_no_iterations_time():
    hands = Hands()
    clock = IterationClock(hands)
    clock.begin()
    hands.pass_seconds(0.5)
    first = clock.end(1, 1)
    hands.pass_seconds(9.0)
    clock.restart()
    hands.pass_seconds(0.25)
    assert (first.seconds, clock.end(1, 2).seconds) == (0.5, 0.25)


def test_an_iteration_whose_beginning_was_not_seen_is_none():
    hands = Hands()
    clock = IterationClock(hands)
    assert clock.end(1, 1) is None
    hands.pass_seconds(2.0)
    assert clock.end(2, 1).seconds == 2.0
