"""Progress, remaining time and throughput of a job, and how its usual throughput follows."""

from __future__ import annotations

import math

import pytest
from msgspec import structs

from holdfast.protocol.wire import AttemptFinished, IntervalDecision, Samples
from holdfast_server.samples.limits import (
    LEAST_USUAL_SECONDS,
    USUAL_SECONDS,
    RecentSamples,
    latest,
    throughput,
    usual_throughput,
)

T = 1_790_000_000.0
JOB = "/api/v1/jobs/char-gpt"
DECISION = IntervalDecision(
    at=T, iteration=30, lineage=1, policy="goodput", interval=10, budget=0.035, predicted_overhead=None,
    measured_overhead=None, total_iterations=300, samples_per_iteration=64.0,
)  # fmt: skip


def report_tokens(agent, iterations, tokens):
    numbers = list(range(agent.iteration + 1, agent.iteration + iterations + 1))
    agent.iteration += iterations
    agent.say(
        samples=Samples(
            iteration=numbers, lineage=[1] * iterations, at=[T + number for number in numbers],
            seconds=[0.5] * iterations, metrics={"tokens": [tokens] * iterations},
        )
    )  # fmt: skip


def test_a_job_that_says_how_long_it_is_has_progress_and_a_remaining_time(job, client):
    job.say(DECISION)
    found = client.get(JOB).json()
    assert (found["total_iterations"], found["samples_per_second"]) == (300, pytest.approx(640))
    assert found["remaining_seconds"] == pytest.approx(27)
    assert "30 of 300, <b>10.0 %</b>" in " ".join(
        client.get("/jobs/char-gpt").text.replace("<b>30</b>", "30").split()
    )
    metrics = client.get("/metrics").text
    assert 'holdfast_job_progress_ratio{job="char-gpt"} 0.1' in metrics
    assert 'holdfast_job_iterations_total{job="char-gpt"} 300.0' in metrics


def test_a_job_past_its_length_is_done_and_one_that_ended_needs_no_time(job, client):
    job.say(structs.replace(DECISION, total_iterations=20))
    assert client.get(JOB).json()["remaining_seconds"] == 0
    job.say(AttemptFinished(at=T, iteration=30, lineage=1, reason="finished"))
    assert client.get(JOB).json()["remaining_seconds"] is None


def test_without_a_length_there_is_none(job, client):
    found = client.get(JOB).json()
    names = ("total_iterations", "remaining_seconds", "tokens_per_second", "samples_per_second")
    assert [found[name] for name in names] == [None] * 4


def test_tokens_of_iterations_give_tokens_per_second(agent, client):
    agent.start()
    report_tokens(agent, 10, 4096)
    assert client.get(JOB).json()["tokens_per_second"] == pytest.approx(8192)
    assert "8,192 tokens/s" in " ".join(client.get("/jobs/char-gpt").text.split())


def trained(recent, seconds, rate, step=10.0):
    for _ in range(round(seconds / step)):
        recent = latest(recent, [1 / rate] * round(step * rate), [], {})
    return recent


def test_the_usual_throughput_is_known_after_half_an_hour_and_follows_in_hours():
    recent = trained(RecentSamples(), LEAST_USUAL_SECONDS - 60, rate=4.0)
    assert usual_throughput(recent) is None
    recent = trained(recent, 3600, rate=4.0)
    assert usual_throughput(recent) == pytest.approx(4.0)
    slow = trained(recent, 600, rate=2.0)
    assert throughput(slow) == pytest.approx(2.0)
    assert usual_throughput(slow) > 3.7
    assert usual_throughput(trained(slow, 10 * USUAL_SECONDS, rate=2.0)) == pytest.approx(2.0, rel=0.01)


def test_tokens_of_varied_length_change_no_throughput_but_their_rate_does():
    recent = RecentSamples()
    for length in (100.0, 300.0) * 2000:
        recent = latest(recent, [length / 100], [], {}, tokens=[length])
    assert throughput(recent) == pytest.approx(100) == usual_throughput(recent)


def test_a_script_that_begins_to_report_tokens_begins_anew():
    recent = latest(trained(RecentSamples(), 7200, rate=4.0), [0.25], [], {}, tokens=[1000.0])
    assert usual_throughput(recent) is None
    assert not math.isnan(throughput(recent) or math.nan)


def test_a_script_that_stops_reporting_tokens_is_measured_by_iterations_again():
    recent = RecentSamples()
    for _ in range(300):
        recent = latest(recent, [10.0], [], {}, tokens=[1000.0])
    assert throughput(recent) == pytest.approx(100) == usual_throughput(recent)
    for _ in range(199):
        recent = latest(recent, [10.0], [], {})
    assert throughput(recent) == pytest.approx(100)
    for _ in range(301):
        recent = latest(recent, [10.0], [], {})
    assert throughput(recent) == pytest.approx(0.1) == usual_throughput(recent)


def test_only_iterations_that_report_tokens_count():
    recent = latest(trained(RecentSamples(), 400, rate=1.0), [2.0] * 10, [], {}, tokens=[1000.0] * 10)
    assert throughput(recent) == pytest.approx(500)
