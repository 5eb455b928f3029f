"""What if: a job's own figures under other settings, and the failures that its attempts tell of."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.pacing import FailureHistory, PacingSettings, Profile
from holdfast.pacing.failures import FailureEstimate
from holdfast.pacing.what_if import compare_intervals
from holdfast.protocol.wire import AttemptFinished, IntervalDecision
from tests.support.postgres import ON_BOTH
from tests.support.server_fixtures import sqlite_unless_marked as sqlite_unless_marked

JOB = "/api/v1/jobs/char-gpt"
PROFILE = {"iteration_seconds": 0.1, "snapshot_seconds": 0.05, "persist_seconds": 0.4, "cost_seconds": 0.02}


def pace(agent: Any, *, interval: int | None = 20, budget: float = 0.035, **profile: float) -> IntervalDecision:
    return IntervalDecision(
        at=agent.at, iteration=agent.iteration, lineage=1, policy="checkfreq", interval=interval, budget=budget,
        predicted_overhead=None, measured_overhead=None, profile=PROFILE | profile,
    )  # fmt: skip


@pytest.fixture
def job(agent, clock):
    """300 iterations of 0.1 s, and heard 30 s after its start."""
    agent.start(world_size=8)
    clock.now += 30
    agent.train(300, pace(agent))
    return agent


def ended(agent: Any, reason: str) -> None:
    agent.say(AttemptFinished(at=agent.at + 30, iteration=agent.iteration, lineage=1, reason=reason))


def next_attempt(agent: Any, clock: Any, *, previous_exit: str | None = None, iterations: int = 100) -> Any:
    """Starts 60 s after the one before did, and trains."""
    clock.now += 30
    following = agent.restarted(f"{agent.uid}-next")
    following.start(world_size=8, previous_exit=previous_exit)
    clock.now += 10
    following.train(iterations, pace(following))
    return following


def plan(client: Any, **requested: object) -> dict[str, Any]:
    reply = client.get(f"{JOB}/plan", params=requested)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_a_job_is_weighed_by_its_own_figures(job, client):
    answer = plan(client)
    expected = compare_intervals(
        Profile(**PROFILE),
        PacingSettings(budget=0.035),
        FailureHistory(failures=FailureEstimate(world_size=8).after(30), restart_seconds=60),
        current=20,
    )
    found = answer["comparison"]
    assert found["best"]["interval"] == expected.best.interval
    assert found["current"]["interval"] == 20
    assert found["current"]["wasted_gpu_hours_per_day"] == pytest.approx(expected.current.wasted_gpu_hours_per_day)
    assert found["mtbf_seconds"] == pytest.approx(expected.mtbf_seconds)
    assert len(found["curve"]) == 60
    assert (found["world_size"], found["lag_seconds"]) == (8, pytest.approx(0.45))
    assert (answer["failures"], answer["running_seconds"], answer["held_by_hand"]) == (0, 30, False)
    assert answer["origins"] == {
        "mtbf_seconds": "assumed", "restart_seconds": "assumed", "world_size": "measured", "budget": "set",
        "write_bytes_per_second": "set", "max_unsaved_seconds": "set",
    }  # fmt: skip


def test_what_is_asked_takes_the_place_of_what_is(job, client):
    limits = {"write_budget": "1TB/day", "max_unsaved_work": "5min"}
    answer = plan(client, budget="2%", every="500", mtbf="3h", ranks="16384", restart="5min", **limits)
    found = answer["comparison"]
    assert found["write_bytes_per_second"] == pytest.approx(1e12 / 86400)
    assert found["max_unsaved_seconds"] == 300
    assert (found["budget"], found["world_size"], found["restart_seconds"]) == (0.02, 16384, 300)
    assert found["mtbf_seconds"] == pytest.approx(3 * 3600)
    assert [each["interval"] for each in found["requested"]] == [500]
    assert found["current"]["interval"] == 20
    assert set(answer["origins"].values()) == {"stated"}
    assert plan(client, budget="0.02")["comparison"]["budget"] == 0.02


def test_more_ranks_fail_more_often_than_was_seen_on_few(job, client):
    few, many = plan(client)["comparison"], plan(client, ranks="800")["comparison"]
    assert many["mtbf_seconds"] < few["mtbf_seconds"] / 3


@pytest.mark.parametrize(
    ("field", "value", "word"),
    [
        ("budget", "300", "outside"),
        ("budget", "lots", "not a number"),
        ("every", "0", "outside"),
        ("every", "1e99", "whole number"),
        ("mtbf", "0", "greater than 0"),
        ("mtbf", "-3h", "outside"),
        ("mtbf", "weekly", "not a time"),
        ("ranks", "0", "from 1 to"),
        ("ranks", "-8", "from 1 to"),
        ("ranks", "²", "from 1 to"),
        ("ranks", "9" * 5000, "from 1 to"),
        ("restart", "-1", "outside"),
        ("restart", "nan", "not a time"),
    ],
)
def test_what_cannot_be_is_refused_by_the_name_of_its_field(job, client, field, value, word):
    reply = client.get(f"{JOB}/plan", params={field: value})
    assert (reply.status_code, reply.json()["error"], reply.json()["field"]) == (422, "invalid_setting", field)
    assert word in reply.json()["message"]
    assert len(reply.json()["message"]) < 200


def test_a_job_that_was_not_measured_yet_says_so(agent, client):
    agent.start()
    answer = plan(client)
    assert (answer["comparison"], answer["why_none"]) == (None, "the job is still measuring its iterations")


def test_a_profile_without_a_time_gives_no_plan(agent, client):
    agent.start()
    agent.train(5, pace(agent, iteration_seconds=0.0))
    assert plan(client)["comparison"] is None


def test_a_job_whose_checkpoints_are_paused_has_nothing_in_force(job, client):
    job.train(1, pace(job, interval=None))
    assert plan(client)["comparison"]["current"] is None


def test_an_unknown_job_is_not_found(client):
    reply = client.get("/api/v1/jobs/unknown/plan")
    assert (reply.status_code, reply.json()["error"]) == (404, "unknown_job")


@ON_BOTH
def test_an_attempt_that_died_without_a_word_is_a_failure(job, client, clock):
    next_attempt(job, clock, previous_exit="killed by SIGKILL")
    answer = plan(client)
    assert answer["failures"] == 1
    assert answer["running_seconds"] == pytest.approx(30 + 10)
    assert answer["origins"]["mtbf_seconds"] == "estimated"
    known = FailureEstimate(world_size=8).after(30, failures=1).after(10)
    assert answer["comparison"]["mtbf_seconds"] == pytest.approx(1 / known.rate)
    low, high = known.credible_interval()
    assert answer["comparison"]["mtbf_low_seconds"] == pytest.approx(1 / high)
    assert answer["comparison"]["mtbf_high_seconds"] == pytest.approx(1 / low)


@pytest.mark.parametrize(("reason", "failures"), [("RuntimeError", 1), ("finished", 0), ("interrupted", 0)])
def test_only_an_error_makes_an_end_that_was_told_a_failure(job, client, clock, reason, failures):
    ended(job, reason)
    assert plan(client)["failures"] == failures
    next_attempt(job, clock)
    assert plan(client)["failures"] == failures


@pytest.mark.parametrize("how", ["killed by SIGTERM", "killed by SIGINT", "exit status 0"])
def test_an_attempt_that_was_told_to_go_is_no_failure(job, client, clock, how):
    next_attempt(job, clock, previous_exit=how)
    assert plan(client)["failures"] == 0


def test_an_attempt_that_runs_or_never_trained_is_no_failure(job, client, clock):
    clock.now += 3600
    assert plan(client)["failures"] == 0  # silent, for an unknown reason
    stillborn = job.restarted("stillborn")
    stillborn.start(world_size=8)
    ended(stillborn, "OSError")
    assert plan(client)["failures"] == 1  # the one before it, not itself


@ON_BOTH
def test_coming_back_takes_what_it_took(job, client, clock):
    # the last iteration 30 s after the start, the next attempt's first 60.1 s after it
    second = next_attempt(job, clock, previous_exit="killed by SIGKILL")
    answer = plan(client)
    assert (answer["restarts"], answer["origins"]["restart_seconds"]) == (1, "measured")
    first_iteration = second.at + 301 * 0.1
    assert answer["comparison"]["restart_seconds"] == pytest.approx(first_iteration - (job.at + 30))


def test_an_interval_set_by_hand_is_told_as_such(job, client):
    reply = client.patch(f"{JOB}/desired", json={"every": 7}, headers={"If-Match": '"0"'})
    assert reply.status_code == 200
    assert plan(client)["held_by_hand"] is True


def test_the_plan_is_in_the_api_s_description(client):
    document = client.get("/openapi.json").json()
    operation = document["paths"]["/api/v1/jobs/{job}/plan"]["get"]
    answer = operation["responses"]["200"]["content"]["application/json"]["schema"]
    assert answer == {"$ref": "#/components/schemas/JobPlan"}
    fields = document["components"]["schemas"]
    assert {"curve", "best", "current", "policies"} <= set(fields["IntervalComparison"]["properties"])
    assert "wasted_gpu_hours_per_day" in fields["IntervalForecast"]["properties"]
    assert {each["name"] for each in operation["parameters"]} == {
        "job", "budget", "write_budget", "max_unsaved_work", "every", "mtbf", "ranks", "restart",
    }  # fmt: skip
    assert "IntervalForecast" in client.get("/docs").text


def test_what_the_script_states_is_what_the_page_plans_with(agent, client, clock):
    agent.start(world_size=8)
    clock.now += 30
    paced = pace(agent)
    paced.mtbf_seconds = 7200.0
    agent.train(300, paced)
    answer = plan(client)
    found = answer["comparison"]
    assert found["mtbf_seconds"] == pytest.approx(7230, rel=0.001)  # and half a minute without a failure
    assert answer["origins"]["mtbf_seconds"] == "stated"
    assert plan(client, mtbf="3h")["comparison"]["mtbf_seconds"] == pytest.approx(3 * 3600)
