from __future__ import annotations

import json

import pytest

from holdfast.commands import control
from holdfast.store import open_store
from holdfast.store.records import HaltNote, newest_halt
from tests.support.fake_server import FakeServer, Holdfast


def sent(server: FakeServer) -> list[object]:
    return [body for method, _, body in server.requests if method == "PATCH"]


@pytest.mark.parametrize(
    ("arguments", "body", "said"),
    [
        (["budget", "gpt", "2%"], {"budget": 0.02}, "budget 2 %: version 4, applied at iteration 251"),
        (["budget", "gpt", "0.05"], {"budget": 0.05}, "budget 5 %: version 4"),
        (["budget", "gpt", "default"], {"budget": None}, "budget set by the script: version 4"),
        (
            ["write-budget", "gpt", "2TB/day"],
            {"write_budget": 2e12 / 86400},
            "write budget 2 TB/day: version 4",
        ),
        (["write-budget", "gpt", "default"], {"write_budget": None}, "write budget set by the script: version 4"),
        (["unsaved-work", "gpt", "5min"], {"max_unsaved_work": 300.0}, "unsaved work at most 5 min: version 4"),
        (["unsaved-work", "gpt", "default"], {"max_unsaved_work": None}, "unsaved work set by the script"),
        (["every", "gpt", "50"], {"every": 50}, "a checkpoint every 50 iterations: version 4"),
        (
            ["every", "gpt", "50", "--for", "2h"],
            {"every": 50, "every_seconds": 7200.0},
            "a checkpoint every 50 iterations for 2h: version 4",
        ),
        (["every", "gpt", "2h30min"], {"every": "2h30min"}, "a checkpoint every 2 h 30 min: version 4"),
        (["every", "gpt", "auto"], {"every": None}, "interval set by the policy: version 4"),
        (["policy", "gpt", "goodput"], {"policy": "goodput"}, "policy goodput: version 4"),
        (["policy", "gpt", "default"], {"policy": None}, "policy set by the script: version 4"),
        (
            ["retention", "gpt", "size 0.2TB, last 5"],
            {"retention": "last 5, size 200GB"},
            "retention 'last 5, size 200GB': version 4",
        ),
        (["retention", "gpt", "default"], {"retention": None}, "retention set by the script: version 4"),
        (["pause-checkpoints", "gpt"], {"paused": True}, "checkpoints paused: version 4"),
        (["resume-checkpoints", "gpt"], {"paused": False}, "checkpoints resumed: version 4"),
    ],
)
def test_an_edit_is_sent_and_its_acknowledgement_printed(
    holdfast: Holdfast, server: FakeServer, arguments: list[str], body: object, said: str
) -> None:
    result = holdfast(*arguments)
    assert (result.exit_code, sent(server)) == (0, [body])
    assert result.stdout.startswith(said)


@pytest.mark.parametrize(
    ("budget", "reason"),
    [
        ("-1", "outside 0.01% to 100%"),
        ("0", "outside 0.01% to 100%"),
        ("300", "outside 0.01% to 100%"),
        ("nan", "outside 0.01% to 100%"),
        ("2", "did you mean 2%?"),
        ("abc", "is not a number"),
    ],
)
def test_a_budget_that_makes_no_sense_is_refused_before_anything_is_sent(
    holdfast: Holdfast, server: FakeServer, budget: str, reason: str
) -> None:
    result = holdfast("budget", "gpt", budget)
    assert (result.exit_code, server.requests) == (2, [])
    assert reason in result.stderr
    assert repr(budget) in result.stderr


def test_rules_that_are_none_are_refused_before_anything_is_sent(holdfast: Holdfast, server: FakeServer) -> None:
    result = holdfast("retention", "gpt", "lst 5")
    assert (result.exit_code, server.requests) == (2, [])
    assert "'lst 5' is not a rule: use last 5, every 1000" in result.stderr


@pytest.mark.parametrize("every", ["0", "-5", "1.5", "often"])
def test_an_interval_that_makes_no_sense_is_refused_before_anything_is_sent(
    holdfast: Holdfast, server: FakeServer, every: str
) -> None:
    result = holdfast("every", "gpt", every)
    assert (result.exit_code, server.requests) == (2, [])
    assert repr(every) in result.stderr


def test_a_policy_that_the_server_does_not_have_is_wrong_use(holdfast: Holdfast) -> None:
    result = holdfast("policy", "gpt", "astrology")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "holdfast: policy 'astrology' is not one of goodput\n"


def test_a_misspelt_option_of_a_command_that_takes_minus_signs_is_refused(
    holdfast: Holdfast, server: FakeServer
) -> None:
    assert holdfast("budget", "gpt", "2%", "--jsno").exit_code == 2
    assert server.requests == []


def test_json_tells_version_and_iteration(holdfast: Holdfast) -> None:
    output = json.loads(holdfast("budget", "gpt", "2%", "--json").stdout)
    assert (output["applied"], output["applied_iteration"], output["desired"]["version"]) == (True, 251, 4)


def test_a_job_that_is_not_there_to_apply_it_is_not_waited_for(holdfast: Holdfast, server: FakeServer) -> None:
    server.applies = server.alive = False
    result = holdfast("pause-checkpoints", "gpt")
    assert result.exit_code == 0
    assert "not applied yet (gpt is stopped)" in result.stdout


def test_waiting_for_a_job_that_does_not_apply_it_ends(
    holdfast: Holdfast, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "ACKNOWLEDGED_WITHIN_SECONDS", 0.0)
    server.applies = False
    assert "not applied yet (gpt is running)" in holdfast("pause-checkpoints", "gpt").stdout


def test_no_wait_returns_when_the_server_has_it(holdfast: Holdfast, server: FakeServer) -> None:
    server.applies = False
    assert "not applied yet" in holdfast("budget", "gpt", "2%", "--no-wait").stdout


def test_somebody_elses_edit_in_between_is_reported(holdfast: Holdfast, server: FakeServer) -> None:
    server.conflict = True
    result = holdfast("budget", "gpt", "2%")
    assert result.exit_code == 1
    assert "ann set the budget to 1%" in result.stderr


def test_an_unknown_job_is_named(holdfast: Holdfast) -> None:
    result = holdfast("pause-checkpoints", "unknown-job")
    assert result.exit_code == 1
    assert result.stderr == "holdfast: job 'unknown-job' not found; `holdfast jobs` lists the jobs\n"


def test_a_pause_is_ended_in_the_store_where_the_user_has_no_name(
    holdfast: Holdfast, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr("getpass.getuser", lambda: {}["the number of the user"])
    store = open_store(tmp_path)
    attempt = store.acquire_attempt("gpt", "first").number
    store.append("gpt", HaltNote(attempt=attempt, state="paused", by="ana", order="o", iteration=7, at=1.0))
    assert holdfast("continue", "gpt", "--store", tmp_path).exit_code == 0
    note = newest_halt(store, "gpt")
    assert note is not None
    assert (note.state, note.by, note.order) == ("continued", "an operator", "o")
