"""The division of a limit for a store among jobs: pure functions."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_server.records.share_division import LAPSE_SECONDS, Limit, Writer, divide, earned_after, fair_shares

RATES = st.floats(1.0, 1e12)
WEIGHTS = st.floats(0.01, 100.0)
JOBS = st.lists(st.tuples(st.one_of(RATES, st.just(math.inf)), WEIGHTS), min_size=1, max_size=40)


@given(RATES, JOBS)
def test_fair_shares_use_the_limit_and_not_more(limit: float, jobs: list[tuple[float, float]]) -> None:
    needs, weights = [need for need, _ in jobs], [weight for _, weight in jobs]
    shares = fair_shares(limit, needs, weights)
    assert sum(shares) <= limit * (1 + 1e-9)
    assert all(0 <= share <= need for share, need in zip(shares, needs, strict=True))
    assert sum(shares) >= min(limit, sum(needs)) * (1 - 1e-6)


@given(RATES, JOBS)
def test_who_gets_less_than_it_needs_gets_no_less_by_weight_than_any_other(
    limit: float, jobs: list[tuple[float, float]]
) -> None:
    shares = fair_shares(limit, [need for need, _ in jobs], [weight for _, weight in jobs])
    by_weight = [share / weight for share, (_, weight) in zip(shares, jobs, strict=True)]
    for share, (need, _), own in zip(shares, jobs, by_weight, strict=True):
        if share < need * (1 - 1e-6):
            assert own >= max(by_weight) * (1 - 1e-6)


def test_what_a_job_does_not_need_goes_to_the_others_by_weight() -> None:
    assert fair_shares(100.0, [10.0, math.inf, math.inf], [1.0, 1.0, 2.0]) == pytest.approx([10.0, 30.0, 60.0])


@given(
    RATES,
    st.integers(1, 10),
    st.lists(
        st.builds(
            Writer,
            weight=WEIGHTS,
            checkpoint_bytes=st.integers(0, 2**40),
            interval_seconds=st.one_of(st.none(), st.floats(0.1, 1e6)),
            is_writing=st.booleans(),
            wanted_at=st.one_of(st.none(), st.floats(0, 1000)),
            earned_at=st.one_of(st.none(), st.floats(0, 1000)),
        ),
        max_size=30,
    ),
)
def test_writes_stay_within_the_limit_and_starts_within_the_number(
    rate: float, writers: int, jobs: list[Writer]
) -> None:
    named = {str(number): job for number, job in enumerate(jobs)}
    found = divide(Limit(bytes_per_second=rate, writers=writers), named, now=1000.0)
    writing = [found[name].bytes_per_second or 0.0 for name, job in named.items() if job.is_writing]
    assert sum(writing) <= rate * (1 + 1e-9)
    assert not writing or sum(writing) >= rate * (1 - 1e-9)
    assert sum(each.fallback_bytes_per_second for each in found.values()) <= rate * (1 + 1e-9)
    granted = [name for name, each in found.items() if each.is_granted]
    assert all(named[name].wanted_at is not None for name in granted)
    waiting = sum(job.wanted_at is not None for job in jobs)
    assert len(granted) == min(waiting, max(0, writers - len(writing)))
    assert all(each.longest_wait_seconds > 0 for each in found.values())


def begun(job: Writer, fair: float, now: float) -> Writer:
    """Return a job that began a checkpoint and at once wants the next one."""
    return replace(job, earned_at=earned_after(job.earned_at, fair, job.checkpoint_bytes, now=now))


def test_every_job_that_waits_begins_within_a_round() -> None:
    """Twenty jobs that always want to write take turns, whatever their names."""
    jobs = {f"{number:02}": Writer(checkpoint_bytes=100, wanted_at=0.0) for number in range(20)}
    limit, starts = Limit(bytes_per_second=100.0, writers=1), dict.fromkeys(jobs, 0)
    for second in range(1, 101):
        found = divide(limit, jobs, now=float(second))
        (name,) = [name for name, each in found.items() if each.is_granted]
        starts[name] += 1
        jobs[name] = begun(jobs[name], found[name].fair_bytes_per_second, float(second))
    assert set(starts.values()) == {5}


def test_a_weight_of_two_gets_twice_the_starts() -> None:
    jobs = {name: Writer(checkpoint_bytes=100, wanted_at=0.0) for name in "abc"} | {
        "heavy": Writer(checkpoint_bytes=100, wanted_at=0.0, weight=2.0)
    }
    limit, starts = Limit(bytes_per_second=100.0, writers=1), dict.fromkeys(jobs, 0)
    for second in range(1, 501):
        found = divide(limit, jobs, now=float(second))
        (name,) = [name for name, each in found.items() if each.is_granted]
        starts[name] += 1
        jobs[name] = begun(jobs[name], found[name].fair_bytes_per_second, float(second))
    assert starts["heavy"] == pytest.approx(2 * starts["a"], rel=0.1)


def test_an_unused_start_keeps_its_place_for_a_while_only() -> None:
    unused = Writer(granted_at=100.0)
    waits = Writer(wanted_at=101.0)
    limit = Limit(bytes_per_second=1.0, writers=1)
    for now, is_granted in (100.0 + LAPSE_SECONDS - 1, False), (100.0 + LAPSE_SECONDS, True):
        assert divide(limit, {"unused": unused, "waits": waits}, now=now)["waits"].is_granted is is_granted
