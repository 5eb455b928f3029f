"""How many checkpoints are under way at a time, on stores whose Ts(N) is known."""

import itertools

import pytest

from holdfast.pacing.concurrency import PATIENCE, REMEMBERED, TRIED_AGAIN_CHECKPOINTS, Concurrency


def settled(seconds_at, limit=4, floor_seconds=0.0, checkpoints=60):
    """After so many checkpoints on a store that takes `seconds_at(n)` with n under way."""
    chosen = Concurrency(limit)
    for _ in range(checkpoints):
        chosen.measured(chosen.in_flight, seconds_at(chosen.in_flight))
        chosen.choose(snapshot_seconds=0.1, floor_seconds=floor_seconds)
    return chosen


def test_where_bandwidth_is_the_limit_one_at_a_time_is_as_good_as_many():
    assert settled(lambda n: 5.0 * n).in_flight == 1


def test_where_waiting_is_the_limit_as_many_as_there_may_be():
    assert settled(lambda n: 5.0).in_flight == 4


def test_one_more_only_as_long_as_it_pays():
    assert settled(lambda n: {1: 6.0, 2: 6.2, 3: 9.2, 4: 12.4}[n]).in_flight == 2


def test_no_more_than_the_interval_asks_for():
    assert settled(lambda n: 5.0, floor_seconds=6.0).in_flight == 1
    assert settled(lambda n: 5.0, floor_seconds=2.0).in_flight == 3


def test_one_slot_leaves_no_choice():
    assert settled(lambda n: 5.0, limit=1).in_flight == 1


def follow(chosen, seconds_at, checkpoints):
    """The numbers in flight that so many further checkpoints were begun with."""
    seen = []
    for _ in range(checkpoints):
        seen.append(chosen.in_flight)
        chosen.measured(chosen.in_flight, seconds_at(chosen.in_flight))
        chosen.choose(snapshot_seconds=0.1, floor_seconds=0.0)
    return seen


def test_what_did_not_pay_is_tried_again_after_a_long_time():
    seen = follow(Concurrency(2), lambda n: 5.0 * n, 3 * TRIED_AGAIN_CHECKPOINTS)
    trials = [at for at, (before, now) in enumerate(itertools.pairwise(seen)) if before < now]
    assert len(trials) == 3
    assert all(later - earlier >= TRIED_AGAIN_CHECKPOINTS for earlier, later in itertools.pairwise(trials))
    assert sum(n == 2 for n in seen) == 3 * REMEMBERED


def test_what_pays_is_doubted_now_and_then_and_stays():
    seen = follow(Concurrency(2), lambda n: 5.0, 3 * TRIED_AGAIN_CHECKPOINTS)
    assert sum(n == 1 for n in seen) <= 5 * REMEMBERED


def test_a_store_that_becomes_slow_under_many_is_given_fewer():
    chosen = settled(lambda n: 5.0)
    assert chosen.in_flight == 4
    assert follow(chosen, lambda n: 5.0 * n, 4 * TRIED_AGAIN_CHECKPOINTS)[-1] == 1


@pytest.mark.parametrize("seconds", [0.5, 20.0])
def test_a_store_that_is_quicker_or_slower_for_all_numbers_alike_changes_none(seconds):
    chosen = settled(lambda n: 5.0)
    seen = follow(chosen, lambda n: seconds, 2 * TRIED_AGAIN_CHECKPOINTS)
    assert sum(n >= 3 for n in seen) == len(seen)
    assert chosen.persist_seconds == seconds


def test_with_nothing_to_overlap_any_more_there_is_one_again():
    chosen = settled(lambda n: 50.0, floor_seconds=6.0)
    assert chosen.in_flight == 4
    for _ in range(20):
        chosen.measured(1, 5.0)
        chosen.choose(snapshot_seconds=0.1, floor_seconds=6.0)
    assert (chosen.in_flight, chosen.persist_seconds) == (1, 5.0)


def test_a_trial_in_which_they_never_overlap_ends():
    chosen = Concurrency(2)
    chosen.measured(1, 5.0)
    assert chosen.choose(snapshot_seconds=0.1, floor_seconds=1.0)
    for _ in range(PATIENCE):
        chosen.measured(1, 5.0)
        chosen.choose(snapshot_seconds=0.1, floor_seconds=1.0)
    assert chosen.in_flight == 1


@pytest.mark.parametrize("in_flight", [0, -1, 99])
def test_odd_numbers_do_no_harm(in_flight):
    chosen = Concurrency(2)
    chosen.measured(in_flight, 1.0)
    chosen.choose(0.1, 0.0)
    assert chosen.in_flight in (1, 2)
