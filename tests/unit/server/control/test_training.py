"""Orders to pause, continue and end training, and what agents report about them."""

from __future__ import annotations

import pytest

from holdfast.protocol.orders import HaltReport
from holdfast.protocol.wire import AttemptFinished
from holdfast_server.records.audit import KINDS

JOB = "/api/v1/jobs/char-gpt"


def order(client, action):
    return client.post(f"{JOB}/training/{action}")


def halted(job, client, state, by="operator", **fields):
    known = client.get(f"{JOB}/desired").json()["training"]
    fields = {"order": known and known["id"]} | fields
    job.say(HaltReport(at=job.at, iteration=job.iteration, lineage=1, state=state, by=by, **fields))


def seen(client):
    return client.get(JOB).json()


def test_a_pause_is_ordered_reported_and_continued(job, client):
    placed = order(client, "pause").json()["training"]
    assert (placed["action"], placed["who"]) == ("pause", "operator")
    assert order(client, "pause").json()["training"] == placed  # once, however often it is sent
    halted(job, client, "paused")
    assert (seen(client)["status"], seen(client)["status_reason"]) == ("paused", "training is paused by operator")
    page = client.get("/jobs/char-gpt").text
    assert "Continue training" in page
    assert "Pause training" not in page
    assert order(client, "continue").json()["training"]["action"] == "continue"
    halted(job, client, "continued")
    assert seen(client)["training_paused_at"] is None
    assert "Pause training" in client.get("/jobs/char-gpt").text
    assert order(client, "pause").json()["training"]["id"] != placed["id"]


def test_the_timeline_has_each_pause(job, client):
    order(client, "pause")
    halted(job, client, "paused")
    (pause,) = client.get(f"{JOB}/timeline").json()["pauses"]
    assert (pause["iteration"], pause["who"], pause["ended_at"]) == (job.iteration, "operator", None)
    order(client, "continue")
    job.at += 60
    halted(job, client, "continued")
    (pause,) = client.get(f"{JOB}/timeline").json()["pauses"]
    assert (pause["at"], pause["ended_at"], pause["abandoned"]) == (job.at - 60, job.at, False)


def test_what_was_continued_in_the_store_is_no_longer_ordered(job, client):
    order(client, "pause")
    halted(job, client, "paused")
    halted(job, client, "continued", by="a command")
    assert client.get(f"{JOB}/desired").json()["training"] is None


def test_an_end_is_no_failure_and_names_its_author(job, client):
    order(client, "end")
    halted(job, client, "ended", by="ana")
    job.say(AttemptFinished(at=job.at, iteration=job.iteration, lineage=1, reason="ended"))
    found = seen(client)
    assert (found["status"], found["status_reason"]) == ("stopped", f"ended by ana at iteration {job.iteration}")
    assert found["desired"]["training"] is None
    assert order(client, "pause").status_code == 409


def test_an_end_that_failed_is_no_longer_ordered(job, client):
    order(client, "end")
    halted(job, client, "failed", reason="no space")
    assert (seen(client)["status"], seen(client)["desired"]["training"]) == ("running", None)


def test_what_is_not_paused_cannot_be_continued(job, client):
    refused = order(client, "continue")
    assert (refused.status_code, refused.json()["error"]) == (409, "not_possible")
    assert client.post("/api/v1/jobs/unknown/training/pause").status_code == 404
    assert client.post(f"{JOB}/training/stop").status_code == 404


def test_a_pause_of_the_rule_is_continued_by_an_operator(job, client):
    halted(job, client, "paused", by="policy", order=None)
    assert seen(client)["training_paused_by"] == "policy"
    first = order(client, "continue").json()["training"]["id"]
    halted(job, client, "continued")
    halted(job, client, "paused", by="policy", order=None)
    assert order(client, "continue").json()["training"]["id"] != first


@pytest.mark.parametrize("action", ["pause", "end"])
def test_the_dialogs_ask_before_anything_is_ordered(job, client, action):
    page = client.get(f"/jobs/char-gpt/training/{action}").text
    assert f"{action.capitalize()} training of char-gpt?" in page
    assert client.get(f"{JOB}/desired").json()["training"] is None
    sent = client.post(f"/jobs/char-gpt/training/{action}", follow_redirects=False)
    assert (sent.status_code, sent.headers["location"]) == (303, "/jobs/char-gpt#controls")
    assert client.get(f"{JOB}/desired").json()["training"]["action"] == action


def test_each_order_is_in_the_audit_log(job, client):
    for action in ("pause", "continue", "end"):
        order(client, action)
    entries = client.get("/api/v1/audit", params={"job": "char-gpt"}).json()["entries"]
    found = [each["action"] for each in reversed(entries) if each["action"].startswith("training")]
    assert found == ["training.pause", "training.continue", "training.end"]
    assert "training" in KINDS
