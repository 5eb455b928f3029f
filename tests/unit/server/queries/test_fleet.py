from __future__ import annotations

from collections import Counter

import pytest

from holdfast.protocol.ids import checkpoint_id
from holdfast.protocol.wire import AttemptFinished, AttemptStarted, LineageStarted, Stall
from tests.support import database_queries

JOB = "/api/v1/jobs/char-gpt"


def status(client):
    summary = client.get(JOB).json()
    return summary["status"], summary["status_reason"]


def test_no_jobs_yet(client):
    assert client.get("/api/v1/jobs").json()["jobs"] == []
    assert client.get(JOB).status_code == 404


def test_jobs_come_with_the_one_heard_last_first_and_can_be_searched(client, fresh_agent, clock):
    for name in ("alpha", "beta_1", "betaX1"):
        clock.now += 1
        fresh_agent(client, job=name, uid=name).start()
    assert [one["job"] for one in client.get("/api/v1/jobs").json()["jobs"]] == ["betaX1", "beta_1", "alpha"]
    assert [one["job"] for one in client.get("/api/v1/jobs?search=ETA_").json()["jobs"]] == ["beta_1"]


def test_a_job_names_its_host_by_which_it_can_be_searched(client, fresh_agent, clock):
    for name, host in (("alpha", "GPU-17"), ("beta", "gpu-18")):
        agent = fresh_agent(client, job=name, uid=name)
        agent.say(AttemptStarted(at=clock.now, iteration=0, lineage=1, host=host))
    found = client.get("/api/v1/jobs?search=gpu-17").json()["jobs"]
    assert [(job["job"], job["host"]) for job in found] == [("alpha", "GPU-17")]


def test_a_job_is_starting_until_its_first_iteration(agent, client):
    agent.start()
    assert status(client)[0] == "starting"
    agent.train(1)
    assert status(client)[0] == "running"


def test_a_job_that_is_not_heard_any_more_is_silent(agent, client, clock):
    agent.start()
    agent.train(1)
    clock.now += 120
    assert status(client) == ("silent", "no report for 2 min")
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
        ("interrupted", ("stopped", "interrupted at iteration 4")),
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


def test_unsaved_work_counts_from_the_last_durable_checkpoint_on_the_way_here(agent, client):
    agent.start()
    agent.train(10, seconds=0.5)
    assert client.get(JOB).json()["unsaved_iterations"] == 10
    agent.checkpoint(6)
    agent.checkpoint(9, state="persisting")
    summary = client.get(JOB).json()
    assert (summary["unsaved_iterations"], summary["unsaved_seconds"]) == (4, 2.0)
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


FULL = "No space left on device"


def test_checkpoints_that_fail_one_after_the_other_are_told_until_one_is_durable(agent, client):
    agent.start()
    agent.train(10)
    agent.checkpoint(1, state="failed", reason="an old one", snapshot_started_at=1.0)
    agent.checkpoint(2, snapshot_started_at=2.0)
    assert client.get(JOB).json()["failing"] is None
    for number in (3, 4, 5):
        agent.checkpoint(number, state="failed", reason=f"{FULL} ({number})", snapshot_started_at=float(number))
    agent.checkpoint(6, state="torn", reason=FULL, snapshot_started_at=6.0)
    agent.checkpoint(7, state="persisting", snapshot_started_at=7.0)
    (row,) = client.get("/api/v1/jobs").json()["jobs"]
    assert row["failing"] == {"count": 4, "reason": FULL, "since": 3.0}
    assert 'holdfast_job_checkpoints_failing{job="char-gpt"} 4.0' in client.get("/metrics").text
    agent.checkpoint(7, snapshot_started_at=7.0)
    assert client.get(JOB).json()["failing"] is None


def test_a_checkpoint_that_a_crash_cut_short_is_no_failing_one(agent, client):
    agent.start()
    agent.train(10)
    agent.checkpoint(5, state="persisting")
    agent.restarted().start()
    assert client.get(f"{JOB}/checkpoints").json()["checkpoints"][0]["state"] == "failed"
    assert client.get(JOB).json()["failing"] is None


def test_a_job_of_which_no_checkpoint_was_ever_durable_is_failing(agent, client):
    agent.start()
    agent.checkpoint(5, state="failed", reason=FULL)
    assert client.get(JOB).json()["failing"]["count"] == 1


def stall(iteration, seconds, kind="data_fetch", lineage=1):
    return Stall(at=1.0, iteration=iteration, lineage=lineage, kind=kind, seconds=seconds)


def test_the_longest_stall_of_the_last_thousand_iterations_is_told(agent, client):
    agent.start()
    assert client.get(JOB).json()["longest_stall"] is None
    agent.train(
        1500, stall(500, 9.0), stall(501, 0.4), stall(900, 0.7, "snapshot_wait"), stall(901, 8.0, "restore")
    )
    assert client.get(JOB).json()["longest_stall"] == {"seconds": 0.7, "kind": "snapshot_wait", "iteration": 900}
    assert "Snapshot wait at iteration 900" in " ".join(client.get("/jobs/char-gpt").text.split())


def test_a_stall_after_the_place_that_a_job_went_back_to_is_not_its_own(agent, client):
    agent.start()
    agent.train(30, stall(10, 0.2), stall(25, 3.0))
    agent.checkpoint(20)
    agent.iteration, agent.lineage = 20, 2
    agent.say(LineageStarted(at=agent.at, lineage=2, iteration=20, parent="000000000020-1"))
    assert client.get(JOB).json()["longest_stall"]["iteration"] == 10
    agent.train(5, stall(24, 0.5, lineage=2))
    assert client.get(JOB).json()["longest_stall"]["iteration"] == 24


def test_the_last_durable_checkpoint_lies_on_the_way_to_the_job_through_all_its_lineages(agent, client):
    agent.start()
    agent.train(30)
    for iteration in (10, 20, 30):
        agent.checkpoint(iteration)
    for lineage, back_to, parent in ((2, 20, 1), (3, 15, 2)):
        agent.iteration, agent.lineage = back_to, lineage
        agent.say(
            LineageStarted(at=agent.at, lineage=lineage, iteration=back_to, parent=checkpoint_id(back_to, parent))
        )
    summary = client.get(JOB).json()
    # 20 lies on the way to lineage 2, and after the place at which lineage 3 left it.
    assert (summary["last_durable"]["iteration"], summary["last_durable"]["abandoned"]) == (10, False)
    agent.train(2)
    agent.checkpoint()
    assert client.get(JOB).json()["last_durable"]["id"] == "000000000017-3"


def test_lineages_that_lead_in_a_circle_are_read_to_an_end(agent, client):
    agent.start()
    for lineage, parent in ((1, "000000000005-2"), (2, "000000000005-1")):
        agent.say(LineageStarted(at=1.0, lineage=lineage, iteration=5, parent=parent))
    agent.checkpoint(3)
    assert client.get(JOB).json()["last_durable"]["iteration"] == 3


def test_no_statement_of_the_fleet_is_run_once_for_each_job(client, fresh_agent):
    for number in range(30):
        agent = fresh_agent(client, job=f"job-{number}", uid=f"uid-{number}")
        agent.start()
        agent.train(5, stall(2, 0.5))
        agent.checkpoint(3)
        agent.checkpoint(5, "persisting")
    with database_queries.statements() as statements:
        jobs = client.get("/api/v1/jobs").json()["jobs"]
    assert [job["last_durable"]["iteration"] for job in jobs] == [3] * 30
    # A background job of the server may add a few statements of its own.
    assert max(Counter(sql for sql, _ in statements).values()) < 10
