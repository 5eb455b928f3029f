"""What operators type, as numbers; and settings as they were saved."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta

import pytest

from holdfast.pacing import PacingSettings, interval_iterations, interval_time, parse_every, parse_mtbf
from holdfast.pacing.settings import settings_to_json
from holdfast.units import format_interval


@pytest.mark.parametrize(
    ("typed", "seconds"),
    [("3h", 10800), ("90 min", 5400), ("3.1 h", 11160), ("2 days", 172800), ("500", 500), (0.5, 0.5)],
)  # fmt: skip
def test_a_time_between_failures_is_read_as_people_write_it(typed: str | float, seconds: float) -> None:
    assert parse_mtbf(typed) == seconds


@pytest.mark.parametrize("typed", ["0", 0, "0h", "-3h", "", "often", "3 parsecs", "nan", "inf", float("inf")])
def test_a_time_between_failures_that_is_none_is_refused_with_the_way_out(typed: str | float) -> None:
    with pytest.raises(ValueError, match=rf"mtbf '{typed}'.*(write|outside)"):
        parse_mtbf(typed)


@pytest.mark.parametrize(
    ("typed", "seconds"),
    [("30s", 30), ("10min", 600), ("1.5h", 5400), ("2h30min", 9000), ("2 h 30 min", 9000), ("1d12h", 129600),
     ("250ms", 0.25), (timedelta(minutes=3), 180)],
)  # fmt: skip
def test_an_interval_with_a_unit_is_a_time(typed: str | timedelta, seconds: float) -> None:
    assert parse_every(typed) == timedelta(seconds=seconds)


@pytest.mark.parametrize(
    ("typed", "shown"),
    [("600s", "10 min"), ("2h30min", "2 h 30 min"), ("90s", "1 min 30 s"), ("2 days", "48 h"), ("0.25s", "0.25 s"),
     ("1h1min1.000001s", "1 h 1 min 1.000001 s"), ("1", "1 iteration"), ("5000", "5,000 iterations")],
)  # fmt: skip
def test_an_interval_is_shown_exactly_and_a_shown_time_can_be_typed_again(typed: str, shown: str) -> None:
    assert format_interval(parse_every(typed)) == shown
    if isinstance(parse_every(typed), timedelta):
        assert parse_every(shown) == parse_every(typed)


@pytest.mark.parametrize(("typed", "iterations"), [(50, 50), ("50", 50), (" 7 ", 7), (10**9, 10**9)])
def test_an_interval_without_a_unit_counts_iterations(typed: int | str, iterations: int) -> None:
    assert parse_every(typed) == iterations


@pytest.mark.parametrize(
    "typed",
    [
        "",
        "often",
        "10.5",
        "0s",
        "-3min",
        "3 parsecs",
        "2h30",
        "inf s",
        "1e9 days",
        "nan",
        1.5,
        timedelta(0),
        "0.1us",
    ],
)
def test_an_interval_that_is_neither_is_refused_with_the_way_out(typed: str | timedelta) -> None:
    with pytest.raises(ValueError, match=r"interval .*(write 50 or 10min|outside 1 ms)"):
        parse_every(typed)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf"), 1e300])
def test_a_time_from_a_server_that_makes_no_sense_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="outside 1 ms to 100 years"):
        interval_time(seconds)


def test_a_time_takes_as_many_iterations_as_fill_it() -> None:
    assert interval_iterations(timedelta(seconds=10), 0.1) == 100
    assert interval_iterations(timedelta(seconds=10), 3.0) == 4
    assert interval_iterations(timedelta(seconds=10), 60.0) == 1
    assert interval_iterations(7, 60.0) == 7


@pytest.mark.parametrize("every", [None, 50, timedelta(minutes=10)])
def test_saved_settings_are_those_of_equal_settings_alone(every: int | timedelta | None) -> None:
    settings = PacingSettings(budget=0.02, policy="goodput", mtbf_seconds=3600.0, every=every)
    saved = json.loads(json.dumps(settings_to_json(settings)))
    assert saved == settings_to_json(replace(settings))
    assert saved != settings_to_json(replace(settings, every=timedelta(seconds=50)))
    assert saved != settings_to_json(replace(settings, budget=0.03))
