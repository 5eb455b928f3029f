"""What an iteration is made of, on a clock of its own."""

import pytest
import torch

from holdfast.retention import LoggedMetric
from holdfast.telemetry.iteration_metrics import Iteration, IterationClock, MetricReader


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


def iteration(number, lineage=1):
    return Iteration(number, lineage, at=0.0, seconds=1.0, update_seconds=None)


def test_the_newest_metrics_include_those_that_wait_to_be_sent():
    reader = MetricReader()
    reader.add(iteration(1), {"loss": 3.0, "accuracy": 0.5})
    assert reader.ready()
    reader.add(iteration(2), {"loss": torch.tensor(2.0)})
    loss, accuracy = LoggedMetric(value=2.0, iteration=2), LoggedMetric(value=0.5, iteration=1)
    assert reader.newest(1)() == {"loss": loss, "accuracy": accuracy}
    assert [metrics for _, metrics in reader.ready()] == [{"loss": 2.0}]
    assert reader.newest(1)() == {"loss": loss, "accuracy": accuracy}


def test_the_newest_metrics_are_those_of_the_moment_and_of_the_lineage():
    reader = MetricReader()
    reader.add(iteration(1), {"loss": 3.0})
    assert reader.ready()
    read = reader.newest(1)
    reader.add(iteration(2), {"loss": 2.0})
    assert reader.ready()
    assert read() == {"loss": LoggedMetric(value=3.0, iteration=1)}
    assert reader.newest(2)() == {}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_metric_on_a_device_is_read_without_making_the_loop_wait():
    reader = MetricReader()
    for number in (1, 2):
        reader.add(iteration(number), {"loss": torch.full((), float(number), device="cuda")})
    read = reader.newest(1)
    assert read() == {"loss": LoggedMetric(value=2.0, iteration=2)}
