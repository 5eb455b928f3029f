"""What operators type, as numbers; and settings that an older version saved."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from holdfast.pacing import Controller, Settings, parse_checkpoints, parse_mtbf
from holdfast.pacing.saved import settings_from_json


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


@pytest.mark.parametrize(("typed", "number"), [("40", 40), (1, 1), (" 12 ", 12)])
def test_a_number_of_checkpoints_is_read(typed: int | str, number: int) -> None:
    assert parse_checkpoints(typed) == number


@pytest.mark.parametrize("typed", ["0", -1, "4.5", "many", "", 10**10])
def test_a_number_of_checkpoints_that_is_none_is_refused_with_the_way_out(typed: int | str) -> None:
    with pytest.raises(
        ValueError, match=rf"checkpoints '{typed}' is (not a whole number: write|outside 1 to .*pause)"
    ):
        parse_checkpoints(typed)


def test_settings_come_back_as_they_were_saved() -> None:
    settings = Settings(budget=0.02, policy="convergence", mtbf_seconds=3600.0, checkpoints=40)
    assert settings_from_json(asdict(settings)) == settings
    assert settings_from_json(None) is None


def test_settings_of_an_older_or_newer_version_are_read_as_far_as_they_are_known() -> None:
    older = {"budget": 0.05, "policy": "checkfreq", "every": None, "paused": False}
    assert settings_from_json(older) == Settings(budget=0.05)
    assert settings_from_json({**older, "of_tomorrow": 1}) == Settings(budget=0.05)


def test_a_job_saved_by_an_older_version_goes_on_at_its_interval() -> None:
    state = {
        "version": 1,
        "settings": {"budget": 0.05, "policy": "checkfreq", "every": None, "paused": False},
        "interval": 17,
        "profile": {"iteration_seconds": 1.0, "persist_seconds": 3.0, "cost_seconds": 0.5},
    }
    controller = Controller(Settings(budget=0.05))
    controller.load_state_dict(state)
    assert controller.plan is not None
    assert controller.plan.interval == 17
    assert "as before the restart" in controller.plan.reason
