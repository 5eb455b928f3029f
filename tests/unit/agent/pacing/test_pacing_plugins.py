"""Policies of others: found by their entry point, and harmless whatever is wrong with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import EntryPoint

import pytest

from holdfast.config import Config
from holdfast.pacing import (
    FailureHistory,
    IntervalPlan,
    PacingSettings,
    Profile,
    parse_policy,
    plan,
    planner,
    policies,
    policy_names,
)
from tests.support.pacing_profiles import MEASURED, CheckfreqSettings

Install = Callable[..., None]


def tidal(profile: Profile, settings: PacingSettings, history: FailureHistory) -> IntervalPlan:
    return IntervalPlan(interval=77, reason="at high tide")


def stormy(profile: Profile, settings: PacingSettings, history: FailureHistory) -> IntervalPlan:
    raise RuntimeError("a wave")


def ebbing(profile: Profile, settings: PacingSettings, history: FailureHistory) -> IntervalPlan:
    return IntervalPlan(interval=0)


def silent(profile: Profile, settings: PacingSettings, history: FailureHistory) -> None:
    return None


NOT_A_POLICY = 3


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Entry points as if packages with them were installed."""

    def installed(**policies: str) -> None:
        entries = [EntryPoint(name, value, planner.GROUP) for name, value in policies.items()]
        monkeypatch.setattr(planner, "entry_points", lambda group: entries if group == planner.GROUP else [])
        forget()

    def forget() -> None:
        planner.installed.cache_clear()
        planner._loaded.cache_clear()

    forget()
    yield installed
    monkeypatch.undo()
    forget()


def here(name: str) -> str:
    return f"{__name__}:{name}"


def test_a_policy_of_others_is_found_and_followed(install: Install) -> None:
    install(Tidal=here("tidal"))
    made = plan(MEASURED, PacingSettings(policy="tidal"))
    assert (made.interval, made.policy, made.reason) == (77, "tidal", "at high tide")
    assert parse_policy(" Tidal ") == "tidal"
    assert policy_names() == sorted([*policies, "coci", "tidal"])


def test_a_session_takes_it_from_the_environment(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tidal=here("tidal"))
    monkeypatch.setenv("HOLDFAST_POLICY", "tidal")
    assert Config.from_arguments_and_environment(policy=None).policy == "tidal"


def test_ours_keep_their_names(install: Install) -> None:
    install(checkfreq=here("tidal"))
    assert plan(MEASURED, CheckfreqSettings()).interval == 20
    assert policy_names() == sorted([*policies, "coci"])


def test_nothing_is_looked_for_while_ours_are_asked_for(install: Install) -> None:
    install(broken="no_such_package.anywhere:policy")
    assert plan(MEASURED, PacingSettings(policy="goodput")).policy == "goodput"
    assert planner.installed.cache_info().currsize == 0


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("no_such_package.anywhere:policy", "cannot be loaded: ModuleNotFoundError: No module named"),
        (here("no_such_name"), "cannot be loaded: AttributeError"),
        (here("NOT_A_POLICY"), "is not a function"),
    ],
)
def test_one_that_cannot_be_loaded_is_refused_and_never_stops_a_plan(
    install: Install, value: str, why: str
) -> None:
    install(broken=value)
    made = plan(MEASURED, PacingSettings(policy="broken"))
    assert (made.interval, made.policy) == (20, "checkfreq")
    assert "policy 'broken' of" in made.reason
    assert why in made.reason
    with pytest.raises(ValueError, match="policy 'broken' of"):
        parse_policy("broken")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("stormy", "policy 'other' failed: RuntimeError: a wave; checkfreq decides: "),
        ("ebbing", "policy 'other' returned no valid plan; checkfreq decides: "),
        ("silent", "policy 'other' returned no valid plan; checkfreq decides: "),
    ],
)
def test_one_that_fails_or_makes_no_plan_is_replaced(install: Install, name: str, why: str) -> None:
    install(other=here(name))
    made = plan(MEASURED, PacingSettings(policy="other"))
    assert made == replace(plan(MEASURED, CheckfreqSettings()), reason=made.reason)
    assert made.reason.startswith(why)


def test_one_that_nobody_has_installed_is_named_with_those_that_are(install: Install) -> None:
    install(tidal=here("tidal"))
    with pytest.raises(ValueError, match=r"'often' is not one of checkfreq, .*, tidal, young-daly"):
        parse_policy("often")
