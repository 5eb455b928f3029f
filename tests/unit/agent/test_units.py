"""Sizes, speeds and times as people write them."""

from __future__ import annotations

import pytest

from holdfast.pacing.settings import parse_write_budget
from holdfast.units import (
    duration,
    format_bytes,
    format_exact_rate,
    format_rate,
    parse_bytes,
    parse_count,
    parse_positive_seconds,
    parse_rate,
    parse_seconds,
    parse_speed,
    percent,
)
from tests.support.formats import FORMATS


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90), ("2.5s", 2.5), ("250ms", 0.25), ("3 min", 180), ("3m", 180), ("3h", 10800), ("1.5 H", 5400),
        (" 2 days ", 172800), (".5h", 1800), ("1e3s", 1000), ("0", 0), ("1,000s", 1000),
        ("2h30min", 9000), ("1 day 12 h", 129600), ("1min30s", 90), ("1.5h 6MIN", 5760),
    ],
)  # fmt: skip
def test_a_time_is_read_with_its_unit(text: str, seconds: float) -> None:
    assert parse_seconds(text, "restart") == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text",
    ["", "soon", "3 weeks", "h", "3h20", "3h 20 min x", "2h,30min", "nan", "inf", "--3", "1.2.3", "3h; drop"],
)
def test_what_is_no_time_is_refused_with_the_way_out(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a time: write 2\.5s, 3min or 2h30min") as error:
        parse_seconds(text, "restart")
    assert str(error.value).startswith(f"restart {text!r}")


@pytest.mark.parametrize("text", ["-1s", "200 years", "1e9h", "1e400"])
def test_a_time_out_of_range_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="restart"):
        parse_seconds(text, "restart")


@pytest.mark.parametrize("text", ["0", "0s", "0h"])
def test_a_time_that_has_to_be_more_than_0_is(text: str) -> None:
    with pytest.raises(ValueError, match="greater than 0"):
        parse_positive_seconds(text, "mtbf")


@pytest.mark.parametrize(
    ("text", "size"),
    [("6.5GB", 6.5e9), ("512 MiB", 512 * 2**20), ("1tb", 1e12), ("10B", 10), ("2 TiB", 2 * 2**40), ("1kB", 1000)],
)  # fmt: skip
def test_a_size_is_decimal_or_binary_as_it_says(text: str, size: float) -> None:
    assert parse_bytes(text, "--state") == size


@pytest.mark.parametrize("text", ["6.5", "GB", "0GB", "-1GB", "1e30PB", "6.5 GHz", "nan"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^--state "):
        parse_bytes(text, "--state")


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("2TB/day", 2e12 / 86400), ("500 GB / h", 5e11 / 3600), ("30MB/s", 3e7), ("1GB/min", 1e9 / 60),
        ("100", 100.0), ("2e7", 2e7), ("2 TiB/day", 2 * 2**40 / 86400),
    ],
)  # fmt: skip
def test_a_rate_is_an_amount_per_time(text: str, rate: float) -> None:
    assert parse_rate(text, "write_budget") == pytest.approx(rate)


@pytest.mark.parametrize(
    "text", ["", "2TB/fortnight", "fast", "0/day", "-1GB/h", "nan", "2TB//day", "2h/day", "2TB", "2TB/"]
)
def test_what_is_no_rate_is_refused_with_the_way_out(text: str) -> None:
    with pytest.raises(ValueError, match=r"^write_budget "):
        parse_rate(text, "write_budget")


@pytest.mark.parametrize(("rate", "shown"), [(2e12 / 86400, "2 TB/day"), (2.5e9, "2.5 GB/s"), (1e4, "864 MB/day")])
def test_a_rate_is_written_by_the_day_or_the_second(rate: float, shown: str) -> None:
    assert format_rate(rate) == shown
    assert parse_rate(shown, "x") == pytest.approx(rate, rel=1e-3)


@pytest.mark.parametrize("rate", [2e12 / 86400, 1.2345678e6, 5e11 / 3600, 0.5, 3e9])
def test_an_exact_rate_is_read_back_as_it_was(rate: float) -> None:
    assert parse_rate(format_exact_rate(rate), "x") == pytest.approx(rate, rel=1e-11)


@pytest.mark.parametrize("rate", [23148148.148148146, 1.5, 1e12, 3])
def test_a_write_budget_in_bytes_per_second_is_taken_as_it_is(rate: float) -> None:
    assert parse_write_budget(rate) == pytest.approx(rate)


def test_a_speed_is_a_size_a_second() -> None:
    assert parse_speed("2GB/s", "x") == parse_speed("2 GB / s", "x") == parse_speed("2GB", "x") == 2e9
    with pytest.raises(ValueError, match="'2 Gbit/s' is not a speed"):
        parse_speed("2 Gbit/s", "--write-bandwidth")
    with pytest.raises(ValueError, match="greater than 0"):
        parse_speed("0MB/s", "--write-bandwidth")


def test_parameters_are_counted_in_thousands_millions_and_billions() -> None:
    assert [parse_count(text, "x") for text in ("124M", "7B", "1.5T", "70 b", "1000", "2k")] == [
        124e6, 7e9, 1.5e12, 70e9, 1000, 2000,
    ]  # fmt: skip
    with pytest.raises(ValueError, match="greater than 0"):
        parse_count("0B", "--parameters")


@pytest.mark.parametrize(("function", "value", "text"), FORMATS)
def test_a_figure_has_one_format(function: str, value: float, text: str) -> None:
    formats = {"duration": duration, "percent": percent, "size": format_bytes}
    assert formats[function](value) == text
