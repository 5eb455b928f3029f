"""Values that operators change: what the server keeps, and what it has the agent do."""

from __future__ import annotations

import pytest

from holdfast.protocol.value_rules import define
from holdfast.protocol.values import ValueReport
from holdfast.protocol.wire import LineageStarted

JOB = "/api/v1/jobs/char-gpt"
SCALE = define("lr_scale", 1.0, 0.01, 10.0, ())
OPTIMIZER = define("optimizer", "adam", None, None, ("adam", "sgd"))


def say(job, definition=SCALE, value=None, **fields):
    is_default = value is None
    known = {"at": job.at, "iteration": job.iteration, "lineage": job.lineage}
    job.say(
        ValueReport(
            **known | fields, definition=definition, is_default=is_default,
            value=definition.default if is_default else value,
        )
    )  # fmt: skip


def put(client, value, name="lr_scale"):
    return client.put(f"{JOB}/values/{name}", json={"value": value})


def values(client):
    return {each["definition"]["name"]: each for each in client.get(f"{JOB}/values").json()["values"]}


def wanted(client):
    return [(each["name"], each["value"]) for each in client.get(f"{JOB}/desired").json()["values"]]


def test_a_job_has_the_values_that_its_script_defines(job, client):
    assert values(client) == {}
    say(job)
    say(job, OPTIMIZER)
    assert list(values(client)) == ["lr_scale", "optimizer"]
    assert values(client)["lr_scale"]["is_default"] is True


def test_a_change_is_wanted_until_it_is_applied(job, client):
    say(job)
    reply = put(client, 0.5)
    assert reply.status_code == 200
    (change,) = reply.json()["changes"]
    assert (change["state"], change["value"], change["before"], change["who"]) == (
        "requested",
        0.5,
        None,
        "operator",
    )
    assert wanted(client) == [("lr_scale", 0.5)]
    assert client.get(f"{JOB}/desired").json()["version"] == 1
    say(job, value=0.5, change=change["id"], iteration=33)
    assert wanted(client) == []
    known = values(client)["lr_scale"]
    assert (known["value"], known["is_default"]) == (0.5, False)
    assert (known["changes"][0]["state"], known["changes"][0]["iteration"]) == ("applied", 33)
    (mark,) = client.get(f"{JOB}/annotations").json()["annotations"]
    assert (mark["iteration"], mark["text"], mark["who"]) == (33, "lr_scale: 1 (script) → 0.5", "operator")
    say(job, value=0.5, change=change["id"], iteration=33)  # as the next attempt reports it
    assert len(client.get(f"{JOB}/annotations").json()["annotations"]) == 1


def test_a_second_change_replaces_one_that_is_not_applied(job, client):
    say(job)
    put(client, 0.5)
    changes = put(client, "0.25").json()["changes"]
    assert [(each["state"], each["value"], each["before"]) for each in changes] == [
        ("requested", 0.25, 0.5),
        ("superseded", 0.5, None),
    ]
    assert wanted(client) == [("lr_scale", 0.25)]


def test_a_change_to_what_is_wanted_anyway_is_none(job, client):
    say(job)
    assert put(client, None).json()["changes"] == []
    put(client, 0.5)
    assert len(put(client, 0.5).json()["changes"]) == 1


@pytest.mark.parametrize("value", [20, "much", True, 0], ids=str)
def test_a_value_that_the_script_does_not_allow_is_refused(job, client, value):
    say(job)
    reply = put(client, value)
    assert (reply.status_code, reply.json()["error"]) == (422, "invalid_setting")
    assert "lr_scale" in reply.json()["message"]
    assert wanted(client) == []


def test_a_value_that_the_script_does_not_have_is_not_found(job, client):
    assert put(client, 1.0, "other").status_code == 404


def test_the_agent_may_refuse_a_change(job, client):
    say(job)
    (change,) = put(client, 5.0).json()["changes"]
    say(job, change=change["id"], refused="lr_scale is 0.01 to 2, not 5")
    (change,) = values(client)["lr_scale"]["changes"]
    assert (change["state"], change["reason"]) == ("refused", "lr_scale is 0.01 to 2, not 5")
    assert wanted(client) == []


def test_a_restore_discards_what_was_wanted_before(job, client):
    say(job)
    put(client, 0.5)
    job.say(LineageStarted(at=job.at, lineage=2, iteration=10, parent="000000000010-1", left="000000000030-1"))
    job.lineage = 2
    (change,) = values(client)["lr_scale"]["changes"]
    assert (change["state"], change["reason"]) == ("superseded", "a restore came after it")
    assert wanted(client) == []


def test_a_start_discards_nothing(job, client):
    say(job)
    put(client, 0.5)
    job.say(LineageStarted(at=job.at, lineage=2, iteration=0))
    assert wanted(client) == [("lr_scale", 0.5)]


def test_a_report_of_what_no_script_can_define_is_ignored(job, client):
    say(job, SCALE, 20.0)
    assert values(client) == {}


def test_changes_are_in_the_audit_log_and_the_history(job, client):
    say(job)
    put(client, 0.5)
    (edit,) = client.get(f"{JOB}/edits").json()["edits"]
    assert edit["summary"] == "value lr_scale script default → 0.5"
    (entry,) = client.get("/api/v1/audit?action=value").json()["entries"]
    assert entry["action"] == "value.set"


def test_the_list_of_changes_shows_a_whole_number_as_one(job, client):
    say(job, define("batch_size", 32, 1.0, 1024.0, ()))
    put(client, 64, "batch_size")
    (edit,) = client.get(f"{JOB}/edits").json()["edits"]
    assert edit["summary"] == "value batch_size script default → 64"
