"""The rule about wrong losses as a live setting, and what the newest attempt follows."""

from __future__ import annotations

import pytest

from holdfast.protocol.wire import RestoreModeReport
from tests.support.server_fixtures import JOB

PAGE = "/jobs/char-gpt"


@pytest.fixture
def job(agent):
    agent.start()
    agent.train(30)
    return agent


def set_rule(client, rule, version=0):
    return client.patch(f"{JOB}/desired", json={"on_trouble": rule}, headers={"If-Match": f'"{version}"'})


def test_it_is_a_setting_that_can_be_changed_listed_and_undone(job, client):
    assert set_rule(client, " Restore 3 in 2000 THEN pause").json()["on_trouble"] == "restore 3 in 2000 then pause"
    (edit,) = client.get(f"{JOB}/edits").json()["edits"]
    assert edit["summary"] == "on trouble script default → restore 3 in 2000 then pause"
    client.post(f"{PAGE}/undo", data={"edit": "1", "version": "1"})
    assert client.get(JOB).json()["desired"]["on_trouble"] is None
    refused = set_rule(client, "panic", version=2)
    assert refused.status_code == 422
    assert "observe" in refused.text


def test_the_page_says_what_is_in_force_and_suggests_to_observe(job, client):
    assert "Not reported yet" in client.get(PAGE).text
    report = {"at": job.at, "iteration": 30, "lineage": 1, "mode": "in_place"}
    job.say(RestoreModeReport(**report, on_trouble="off", batches_an_iteration=2))
    assert client.get(JOB).json()["on_trouble"] == "off"
    assert "Observe first" in client.get(PAGE).text
    answer = client.post(f"{PAGE}/trouble", data={"version": "0", "on_trouble": "observe"}, follow_redirects=True)
    assert 'value="observe"' in answer.text
    assert "Observe first" not in answer.text
    job.say(RestoreModeReport(**report, on_trouble="observe"))
    assert "observe" in client.get(f"{PAGE}/controls").text.partition("In force:")[2][:40]


def test_a_rule_that_makes_no_sense_is_refused_with_what_was_typed(job, client):
    answer = client.post(f"{PAGE}/trouble", data={"version": "0", "on_trouble": "panic"})
    assert answer.status_code == 422
    assert 'value="panic" aria-invalid="true"' in answer.text


def test_many_jobs_are_changed_at_once(job, client):
    ask = {"action": "on_trouble", "jobs": ["char-gpt"], "on_trouble": "observe"}
    assert client.post("/api/v1/jobs/changes", json=ask).json()["changed"] == 1
    (again,) = client.post("/api/v1/jobs/changes", json=ask).json()["outcomes"]
    assert again["refusal"] == "it has this reaction already"
    assert client.post("/api/v1/jobs/changes", json=ask | {"on_trouble": "panic"}).status_code == 422
    form = {"action": "on_trouble", "job": ["char-gpt"], "on_trouble": "restore"}
    question = client.post("/fleet/confirm", data=form).text
    assert "Set the reaction to wrong losses of 1 job to restore?" in " ".join(question.split())
    done = client.post("/fleet/change", data={"action": "on_trouble", "jobs": "char-gpt", "on_trouble": "restore"})
    assert done.status_code == 200
    assert client.get(JOB).json()["desired"]["on_trouble"] == "restore"
