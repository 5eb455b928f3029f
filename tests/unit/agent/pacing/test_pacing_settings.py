"""What operators type, as numbers; and settings as they were saved."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from holdfast.pacing import Settings, parse_mtbf
from holdfast.pacing.settings import settings_from_json


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


def test_settings_come_back_as_they_were_saved() -> None:
    settings = Settings(budget=0.02, policy="goodput", mtbf_seconds=3600.0)
    assert settings_from_json(asdict(settings)) == settings
    assert settings_from_json(None) is None


def test_settings_of_a_newer_version_are_read_as_far_as_they_are_known() -> None:
    assert settings_from_json({"budget": 0.05, "of_tomorrow": 1}) == Settings(budget=0.05)
