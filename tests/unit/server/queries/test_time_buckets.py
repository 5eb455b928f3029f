"""Every microsecond of a window is in one bucket, whatever was reported."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast_server.queries.time_buckets import BUCKETS, DEFINITIONS, AttemptTime, Interruption, Span, timesheet

T = 1_790_000_000.0


def span(begins: float, ends: float, *, first: int = 1, seconds: float | None = None, upto: int = 10**9, **sums):
    defaults = {"uid": "a", "stall_seconds": 0.0, "data_seconds": 0.0, "barrier_seconds": 0.0}
    rows = sums.pop("rows", 10)
    return Span(
        begins_at=T + begins, ends_at=T + ends, first_iteration=first, last_iteration=first + rows - 1,
        seconds=ends - begins if seconds is None else seconds, stands_upto=upto, **{**defaults, **sums},
    )  # fmt: skip


def life(started: float, ended: float, uid: str = "a", **fields) -> AttemptTime:
    return AttemptTime(uid=uid, started_at=T + started, ended_at=T + ended, **fields)


def seconds_of(lives, spans, restores=(), *, begins=0.0, ends=100.0, overhead=0.0):
    sheet = timesheet(lives, spans, restores, begins_at=T + begins, ends_at=T + ends, overhead=overhead)
    assert sum(sheet.buckets.values()) == sheet.wall
    return {name: part / 1e6 for name, part in sheet.buckets.items() if part}, sheet


def test_every_bucket_has_a_definition():
    assert set(DEFINITIONS) == set(BUCKETS)


def test_time_is_starting_training_and_waiting_and_down():
    found, sheet = seconds_of(
        [life(0, 60)], [span(10, 50, stall_seconds=4.0, data_seconds=6.0, barrier_seconds=5.0)], ends=100
    )
    assert found == {
        "starting": 10, "productive": 25, "snapshot_wait": 4, "data_fetch": 6, "barrier": 5, "unexplained": 10,
        "down": 40,
    }  # fmt: skip
    assert (sheet.iterations, sheet.lost_iterations) == (10, 0)


def test_the_measured_overhead_beyond_the_waits_is_slow_down():
    found, _ = seconds_of([life(0, 100)], [span(0, 100, stall_seconds=5.0, data_seconds=10.0)], overhead=0.25)
    assert found == {"productive": 70, "snapshot_wait": 5, "checkpoint_slowdown": 15, "data_fetch": 10}
    found, _ = seconds_of([life(0, 100)], [span(0, 100, stall_seconds=30.0)], overhead=0.25)
    assert found == {"productive": 70, "snapshot_wait": 30}


def test_iterations_that_were_thrown_away_are_lost_with_their_waits():
    found, sheet = seconds_of([life(0, 100)], [span(0, 100, upto=4, stall_seconds=10.0)])
    assert found == {"lost": 60, "snapshot_wait": 4, "productive": 36}
    assert (sheet.iterations, sheet.lost_iterations) == (4, 6)


def test_a_restore_in_place_lies_between_two_lineages():
    restored = Interruption("restoring", T + 42, T + 54)
    found, _ = seconds_of([life(0, 100)], [span(0, 40), span(55, 100, first=5)], [restored])
    assert found == {"productive": 85, "restoring": 12, "unexplained": 3}


def test_a_pause_is_neither_training_nor_unexplained():
    pause = Interruption("paused", T + 20, T + 50, "a")
    found, sheet = seconds_of([life(0, 100)], [span(0, 100, seconds=70.0)], [pause])
    assert found == {"productive": 70, "paused": 30}
    assert sheet.iterations == 10
    found, _ = seconds_of([life(0, 40), life(45, 100, "b")], [span(0, 20), span(60, 100, uid="b")], [pause])
    assert found == {"productive": 60, "paused": 20, "down": 5, "starting": 15}


def test_a_window_that_begins_in_a_pause_has_the_iterations_after_it():
    pause = Interruption("paused", T - 50, T + 50, "a")
    lives = [life(-100, 100, trained_before=True)]
    found, sheet = seconds_of(lives, [span(-100, 100, rows=100, seconds=100.0)], [pause])
    assert found == {"productive": 50, "paused": 50}
    assert sheet.iterations == 50


def test_a_window_cuts_what_began_before_it():
    found, sheet = seconds_of(
        [life(-100, 100, trained_before=True)], [span(-50, 50, rows=100, data_seconds=20.0)], begins=0
    )
    assert found == {"productive": 40, "data_fetch": 10, "unexplained": 50}
    assert sheet.iterations == 50


def test_what_was_not_measured_of_a_stretch_is_unexplained():
    found, _ = seconds_of([life(0, 100)], [span(0, 100, seconds=70.0)])
    assert found == {"productive": 70, "unexplained": 30}


def test_before_anything_was_heard_there_is_no_time():
    _, sheet = seconds_of([], [], begins=5.0, ends=5.0)
    assert sheet.wall == 0


times = st.floats(-500, 500, allow_nan=False)
amounts = st.floats(0, 400, allow_nan=False)
lives = st.builds(
    lambda uid, start, length, trained: life(start, start + length, uid, trained_before=trained),
    st.sampled_from("abc"), times, amounts, st.booleans(),
)  # fmt: skip
spans = st.builds(
    lambda uid, begin, length, first, rows, measured, stall, data, barrier, upto: span(
        begin, begin + length, uid=uid, first=first, rows=rows, seconds=measured, stall_seconds=stall,
        data_seconds=data, barrier_seconds=barrier, upto=upto,
    ),
    st.sampled_from("abcd"), times, amounts, st.integers(0, 500), st.integers(1, 300), amounts, amounts, amounts,
    amounts, st.integers(-1, 900),
)  # fmt: skip
restores = st.builds(
    lambda kind, end, seconds, uid: Interruption(kind, T + end - seconds, T + end, uid),
    st.sampled_from(["restoring", "paused"]), times, amounts, st.sampled_from([None, "a", "b"]),
)  # fmt: skip


@settings(max_examples=300, derandomize=True, deadline=None)
@given(
    st.lists(lives, max_size=6, unique_by=lambda one: one.uid), st.lists(spans, max_size=12),
    st.lists(restores, max_size=4), times, amounts,
)  # fmt: skip
def test_the_buckets_of_any_history_sum_up_to_its_window(lives, spans, restores, begin, length):
    sheet = timesheet(lives, spans, restores, begins_at=T + begin, ends_at=T + begin + length)
    assert sum(sheet.buckets.values()) == sheet.wall
    assert min(sheet.buckets.values()) >= 0
    assert min(sheet.iterations, sheet.lost_iterations) >= 0
