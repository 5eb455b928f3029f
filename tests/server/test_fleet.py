from __future__ import annotations

import pytest

from holdfast.protocol import AttemptFinished

JOB = "/api/v1/jobs/char-gpt"


def status(client):
    summary = client.get(JOB).json()
    return summary["status"], summary["status_reason"]


def test_no_jobs_yet(client):
    assert client.get("/api/v1/jobs").json() == {"jobs": []}
    assert client.get(JOB).status_code == 404


def test_jobs_come_with_the_one_heard_last_first_and_can_be_searched(client, fresh_agent, clock):
    for name in ("alpha", "beta_1", "betaX1"):
        clock.now += 1
        fresh_agent(client, job=name, uid=name).start()
    assert [one["job"] for one in client.get("/api/v1/jobs").json()["jobs"]] == ["betaX1", "beta_1", "alpha"]
    assert [one["job"] for one in client.get("/api/v1/jobs?search=ETA_").json()["jobs"]] == ["beta_1"]


def test_a_job_is_starting_until_its_first_iteration(agent, client):
    agent.start()
    assert status(client)[0] == "starting"
    agent.train(1)
    assert status(client)[0] == "running"


def test_a_job_that_is_not_heard_any_more_is_silent(agent, client, clock):
    agent.start()
    agent.train(1)
    clock.now += 120
    assert status(client) == ("silent", "nothing heard for 2 minutes")
    agent.say()
    assert status(client)[0] == "running"


def test_a_job_of_long_iterations_is_not_silent_while_it_trains(agent, client, clock):
    agent.start()
    agent.train(2, seconds=100.0)
    clock.now += 200
    assert status(client)[0] == "running"


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("finished", ("finished", "at iteration 4")),
        ("interrupted", ("finished", "interrupted at iteration 4")),
        ("ValueError: no", ("failed", "ValueError: no at iteration 4")),
    ],
)
def test_a_job_ends_the_way_its_agent_says(agent, client, clock, reason, expected):
    agent.start()
    agent.train(4)
    agent.say(AttemptFinished(at=agent.at, iteration=4, lineage=1, reason=reason))
    clock.now += 10_000
    assert status(client) == expected


def test_a_job_that_was_started_again_runs(agent, client):
    agent.start()
    agent.say(AttemptFinished(at=agent.at, iteration=0, lineage=1, reason="finished"))
    second = agent.restarted()
    second.start()
    second.train(1)
    summary = client.get(JOB).json()
    assert (summary["status"], summary["restarts"], summary["attempt"]) == ("running", 1, 2)


def test_exposure_counts_from_the_last_durable_checkpoint_on_the_way_here(agent, client):
    agent.start()
    agent.train(10, seconds=0.5)
    assert client.get(JOB).json()["exposure_iterations"] == 10
    agent.checkpoint(6)
    agent.checkpoint(9, state="persisting")
    summary = client.get(JOB).json()
    assert (summary["exposure_iterations"], summary["exposure_seconds"]) == (4, 2.0)
    assert summary["last_durable"]["id"] == "000000000006-1"
    assert summary["checkpoints_total"] == 1


def test_speed_and_sparkline_come_from_the_newest_iterations(agent, client):
    agent.start()
    agent.train(500, seconds=1.0)
    agent.train(200, seconds=0.25)
    summary = client.get(JOB).json()
    assert summary["iterations_per_second"] == pytest.approx(4.0)
    assert summary["sparkline"] == [0.25] * 40


def test_prometheus_reads_the_figures_of_jobs(agent, client):
    agent.start()
    agent.train(3)
    text = client.get("/metrics").text
    assert 'holdfast_job_iteration{job="char-gpt"} 3.0' in text
    assert 'holdfast_job_status{job="char-gpt",status="running"} 1.0' in text
    assert 'holdfast_ingest_batches_total{result="acknowledged"} 2.0' in text
    assert "holdfast_ingest_samples_total 3.0" in text
