"""The report of a night: what needs a decision, what failed and what it cost, what was done and by whom."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.protocol.wire import AttemptFinished, OrderStateChange
from holdfast_server.core.principal import Role
from holdfast_server.queries import report as module
from holdfast_server.queries import report_actions
from tests.support.accounts_server import OTHER, OWN
from tests.support.database_queries import statements

T = 1_790_000_000.0
JOB = "/api/v1/jobs/char-gpt"


def report(client, path="/api/v1", **query):
    answer = client.get(f"{path}/report", params=query)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    for project in found["projects"]:
        assert sum(project["buckets"].values()) == pytest.approx(project["gpu_hours"])
    return found


def train(agent, iterations, *, start):
    agent.at = start - agent.iteration
    agent.client.app.state.services.clock.now = start + iterations
    agent.train(iterations, seconds=1.0)
    agent.at = start + iterations


@pytest.fixture
def crashed(agent, clock):
    """A job of 4 ranks that lost 20 of 50 iterations in a crash, was down for 30 s and trains again after 5 s."""
    agent.start(world_size=4, supervised=True, versions={"torch": "2"})
    train(agent, 50, start=T)
    clock.now = T + 50
    agent.say()
    second = agent.restarted()
    second.iteration, second.at = 30, T + 80
    second.start(previous_exit="killed by SIGKILL", world_size=4, supervised=True, versions={"torch": "2"})
    train(second, 25, start=T + 85)
    clock.now = T + 110
    second.say()
    return second


def test_a_failure_has_its_cause_and_its_cost(crashed, client):
    found = report(client, JOB)
    (failure,) = found["failures"]
    assert (failure["cause"], failure["count"], failure["iteration"]) == ("killed by SIGKILL", 1, 50)
    assert (failure["lost_iterations"], failure["lost_seconds"]) == (20, pytest.approx(20))
    assert failure["down_seconds"] == pytest.approx(35)
    assert failure["gpu_hours"] == pytest.approx(4 * 55 / 3600) == found["failures_gpu_hours"]
    assert (failure["continued_from"], failure["continued_by"]) == (30, "holdfast run on node-1")


def test_the_time_is_that_of_the_goodput_of_the_job_multiplied_by_its_ranks(crashed, client):
    buckets = {row["name"]: row["seconds"] for row in client.get(f"{JOB}/goodput?window=24h").json()["buckets"]}
    (project,) = report(client, since="24h")["projects"]
    assert {name: hours * 3600 / 4 for name, hours in project["buckets"].items()} == pytest.approx(buckets)
    assert (project["iterations"], project["lost_iterations"], project["failures"]) == (55, 20, 1)


def test_another_number_of_ranks_counts_from_its_attempt_on(crashed, client, clock):
    before = report(client)["projects"][0]["gpu_hours"]
    third = crashed.restarted("third")
    third.at = T + 110
    third.start(previous_exit="killed by SIGTERM", world_size=8, versions={"torch": "2"})
    train(third, 36, start=T + 110)
    assert report(client)["projects"][0]["gpu_hours"] == pytest.approx(before + 8 * 36 / 3600)


def test_a_stop_that_was_requested_is_no_failure(agent, client, clock):
    agent.start()
    train(agent, 50, start=T)
    agent.say(AttemptFinished(at=T + 50, iteration=50, lineage=1, reason="preempted"))
    assert report(client)["failures"] == []


def test_failures_of_one_cause_are_one_row_and_the_costliest_comes_first(agent, client, clock):
    one, start = agent, T
    for number in range(4):
        one.at = clock.now = start
        one.start(previous_exit=f"exit status {min(number, 2)}" if number else None, versions={"torch": "2"})
        train(one, 30, start=start)
        start += 30 + 10 * number
        one = one.restarted(f"after {number}")
    found = report(client)
    assert [(row["cause"], row["count"]) for row in found["failures"]] == [
        ("exit status 2", 2),
        ("exit status 1", 1),
    ]
    assert found["failures_total"] == 3


def test_a_job_that_failed_needs_a_decision_and_one_that_trains_does_not(agent, client, clock):
    agent.start(world_size=2)
    train(agent, 50, start=T)
    agent.say(AttemptFinished(at=T + 50, iteration=50, lineage=1, reason="OutOfMemoryError"))
    other = replace(agent, job="healthy", uid="healthy", sequence=0, iteration=0, at=T, sent=[])
    other.start()
    train(other, 50, start=T)
    other.checkpoint()
    found = report(client)
    (decision,) = found["decisions"]
    assert (decision["job"], decision["verdict"]["cause"], decision["world_size"]) == ("char-gpt", "failed", 2)
    assert found["failures"][0]["continued_from"] is None
    assert found["jobs"] == 2


def test_what_people_did_is_listed_with_their_names_and_restores_once(crashed, client, clock):
    crashed.checkpoint(40)
    client.patch(f"{JOB}/desired", json={"budget": "2%"}, headers={"If-Match": '"0"'})
    client.post(f"{JOB}/annotations", json={"iteration": 45, "text": "new data"})
    asked = client.post(f"{JOB}/restores", json={"iteration": 40, "key": "k"})
    order = asked.json()["id"]
    for state in ("delivered", "restoring", "restored"):
        crashed.say(OrderStateChange(at=T + 110, order=order, state=state, iteration=55, lineage=1))
    done = report(client, JOB)["actions"]
    assert sorted((row["kind"], row["actor"]) for row in done) == [
        *[("person", "operator")] * 3,
        ("supervisor", "holdfast run on node-1"),
    ]
    texts = "; ".join(row["text"] for row in done)
    assert "restore to 40 from 55: restored" in texts
    assert "annotation at 45: new data" in texts
    assert "budget" in texts


def test_what_happened_before_the_window_is_not_in_it(crashed, client, clock):
    clock.now = T + 20_000
    found = report(client, since="1h")
    assert (found["failures"], found["actions"]) == ([], [])
    assert found["begins_at"] == T + 20_000 - 3600


@pytest.mark.parametrize("since", ["0", "1s", "40d", "soon", "-1h", "nan"])
def test_a_window_that_is_none_is_refused(client, since):
    assert client.get("/api/v1/report", params={"since": since}).status_code == 422


def test_an_unknown_job_is_not_found(client):
    assert client.get("/api/v1/jobs/nothing/report").status_code == 404


def test_a_report_reads_as_many_statements_for_many_jobs_as_for_few(agent, client, clock):
    def report_of(jobs):
        for number in range(jobs):
            one = replace(agent, job=f"job-{number}", uid=f"job-{number}", sequence=0, iteration=0, at=T, sent=[])
            one.start()
            train(one, 10, start=T)
        with statements() as seen:
            report(client)
        return len(seen)

    assert report_of(2) == report_of(20)


def test_of_more_jobs_than_it_may_read_the_largest_are_measured_and_the_report_says_so(
    agent, client, clock, monkeypatch
):
    for number, ranks in enumerate((1, 16, 4)):
        one = replace(agent, job=f"job-{ranks}", uid=f"job-{number}", sequence=0, iteration=0, at=T, sent=[])
        one.start(world_size=ranks)
        train(one, 36, start=T)
    monkeypatch.setattr(module, "MOST_TOTALS", 1)
    found = report(client)
    assert (found["jobs"], found["measured_jobs"]) == (3, 1)
    assert found["projects"][0]["gpu_hours"] == pytest.approx(16 * 36 / 3600)


def test_a_person_sees_the_jobs_of_their_projects_only(stage):
    for project in (OWN, OTHER):
        stage.project(project, f"job-of-{project}")
    stage.person("eve", Role.viewer)
    eve = stage.cookie("eve")
    for query in ({}, {"project": OTHER}):
        answer = stage.client.get("/api/v1/report", params=query, headers=eve)
        assert f"job-of-{OTHER}" not in answer.text
        assert answer.json()["jobs"] == (0 if query else 1)
    page = stage.client.get("/report", headers=eve | {"Accept": "text/html"})
    assert (page.status_code, f"job-of-{OTHER}" in page.text) == (200, False)


def test_the_page_says_the_most_important_first(crashed, client):
    page = client.get("/report").text
    assert "1 failure cost 0.0611 GPU-hours" in page
    assert "lost 20 iterations (20 s), down for 35 s" in page
    titles = ("Needs a decision", "Failures", "Time", "What was done")
    assert sorted(titles, key=lambda title: page.index(f">{title}<")) == list(titles)
    assert 'href="/api/v1/jobs/char-gpt/report?since=7d"' in client.get("/jobs/char-gpt/report?since=7d").text


def test_the_page_folds_what_does_not_fit_on_a_screen(agent, client, clock):
    for number in range(8):
        one = replace(agent, job=f"job-{number}", uid=f"job-{number}", sequence=0, iteration=0, at=T, sent=[])
        one.start()
        train(one, 10, start=T)
        one.say(AttemptFinished(at=T + 10, iteration=10, lineage=1, reason="OutOfMemoryError"))
    page = client.get("/report").text
    assert page.count("<summary>2 more</summary>") == 2  # of decisions, and of failures
    assert all(page.count(f'href="/jobs/job-{number}"') == 2 for number in range(8))


def test_each_restart_is_counted_however_many_there_are(agent, client, clock, monkeypatch):
    monkeypatch.setattr(report_actions, "MOST_ROWS", 2)
    one = agent
    for number in range(4):
        one.at = clock.now = T + 40 * number
        exit_status = "killed by SIGKILL" if number else None
        one.start(previous_exit=exit_status, supervised=True, versions={"torch": "2"})
        train(one, 30, start=one.at)
        one = one.restarted(f"after {number}")
    texts = [row["text"] for row in report(client)["actions"] if row["kind"] == "supervisor"]
    assert [text.split(" from ")[0] for text in texts] == ["started the script again 3 times, last"]
