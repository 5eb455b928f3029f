"""What a rank tells of itself: how often, how much of it, and what of an iteration it spent on others."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from holdfast.protocol import wire
from holdfast.telemetry.iteration_metrics import LEAST_SECONDS, Iteration, IterationClock, RankReporter
from tests.support.fake_server_connection import FakeServerConnection


def rank_reporter(rank=0, world_size=2):
    link = FakeServerConnection()
    return RankReporter(link, rank, world_size), link


def iteration(number, seconds=1.0, *, lineage=1, barrier=0.25, **stalls):
    return Iteration(number, lineage, 1000.0 + number * seconds, seconds, None, stalls, barrier)


def test_iterations_are_summed_up():
    own, link = rank_reporter(rank=1)
    own.add(iteration(1, snapshot_wait=0.5))
    own.add(iteration(2, seconds=3.0, data_fetch=0.25))
    own.add(iteration(3, barrier=None))
    own.close()
    assert link.events == [
        wire.RankTotals(
            at=1003.0, lineage=1, first_iteration=1, last_iteration=3, iterations=3, seconds=5.0,
            longest_seconds=3.0, stall_seconds=0.5, data_seconds=0.25, barrier_iterations=2, barrier_seconds=0.5,
        )
    ]  # fmt: skip


def test_the_link_of_rank_0_is_not_the_tallys_to_close():
    for rank, closed in ((0, False), (1, True)):
        own, link = rank_reporter(rank=rank)
        own.close()
        assert (link.closed, link.events) == (closed, [])


def test_a_lineage_is_told_by_itself():
    own, link = rank_reporter()
    own.add(iteration(1))
    own.add(iteration(1, lineage=2))
    assert [(told.lineage, told.iterations) for told in link.events] == [(1, 1)]


@pytest.mark.parametrize("world_size", [2, 100, 1000])
def test_however_many_ranks_there_are_their_reports_are_few(world_size):
    seconds = 2000
    reports = 0
    for rank in (0, 1, world_size // 2, world_size - 1):
        own, link = rank_reporter(rank, world_size)
        for number in range(seconds):
            own.add(iteration(number))
        times = [told.at for told in link.events]
        assert all(later - sooner >= LEAST_SECONDS for sooner, later in itertools.pairwise(times))
        assert sum(told.iterations for told in link.events) >= seconds - own.every_seconds
        reports = max(reports, len(link.events))
    assert reports * world_size / seconds <= 11


def test_a_report_takes_a_few_hundred_bytes():
    own, link = rank_reporter(rank=999, world_size=1000)
    for number in range(1, 500):
        own.add(iteration(10**6 + number))
    batch = wire.Batch(
        job="a-job-with-a-name-of-thirty-six-char", uid="0" * 32, attempt=12, rank=999, sequence=10**4,
        sent_at=1.79e9, iteration=10**6, lineage=3, events=link.events[-1:],
    )  # fmt: skip
    assert len(link.events) == 4
    assert len(msgspec.msgpack.encode(batch)) < 600


def test_the_barrier_is_from_the_last_gradient_to_the_update():
    now = [100.0]
    clock = IterationClock(lambda: now[0])

    def step(*parts):
        for seconds, then in parts:
            now[0] += seconds
            then()
        return clock.end(1, 1).barrier_seconds

    clock.begin()
    assert step((1.0, clock.gradients_end), (0.25, clock.update_begins), (0.5, clock.update_ends)) == 0.25
    # gradients are added up in two passes, then two optimizers take their steps
    passes = ((1.0, clock.gradients_end), (2.0, clock.gradients_end), (0.5, clock.update_begins))
    assert step(*passes, (0.25, clock.update_begins)) == 0.5
    assert step((1.0, clock.update_begins)) is None
    assert step((1.0, clock.gradients_end)) is None
    assert step((1.0, clock.update_begins)) is None
