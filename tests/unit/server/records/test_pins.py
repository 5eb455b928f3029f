"""Pins and labels: what operators say of one checkpoint, and what the agent is told of it."""

from __future__ import annotations

import json

import pytest

from holdfast.protocol.ids import checkpoint_id
from holdfast.protocol.wire import MAX_PINS, DesiredStateApplied, Inventory
from tests.support.postgres import ON_SQLITE

JOB = "/api/v1/jobs/char-gpt"
FIRST, SECOND = checkpoint_id(10, 1), checkpoint_id(20, 1)


def say(client, checkpoint, **changes):
    return client.patch(f"{JOB}/checkpoints/{checkpoint}", json=changes)


def row(client, checkpoint):
    return next(one for one in client.get(f"{JOB}/checkpoints").json()["checkpoints"] if one["id"] == checkpoint)


def desired(client):
    return client.get(f"{JOB}/desired").json()


def test_nobody_has_said_anything_of_pins_until_somebody_pins(job, client):
    assert desired(client)["pins"] is None
    assert row(client, FIRST)["pinned"] is False


def test_a_pin_reaches_the_agent_and_goes_again(job, client, clock):
    done = say(client, FIRST, pinned=True)
    assert done.status_code == 200
    told = done.json()
    assert (told["id"], told["pinned"], told["pinned_by"], told["pinned_at"]) == (FIRST, True, "operator", clock())
    assert row(client, FIRST) == told
    assert (desired(client)["version"], desired(client)["pins"]) == (1, [FIRST])
    say(client, SECOND, pinned=True)
    assert desired(client)["pins"] == [FIRST, SECOND]
    gone = say(client, FIRST, pinned=False).json()
    assert (gone["pinned"], gone["pinned_by"], gone["pinned_at"]) == (False, None, None)
    say(client, SECOND, pinned=False)
    assert desired(client)["pins"] == []


def test_an_iteration_names_the_checkpoint_that_a_restore_would_go_back_to(job, client):
    assert say(client, 20, pinned=True).json()["id"] == SECOND
    refused = say(client, 25, pinned=True)
    assert (refused.status_code, refused.json()["error"]) == (404, "no_such_checkpoint")
    assert refused.json()["nearest"]["id"] == SECOND


def test_pinned_twice_is_pinned_once_by_who_was_first(job, client, clock):
    first = say(client, FIRST, pinned=True).json()
    clock.now += 60
    assert say(client, FIRST, pinned=True).json() == first
    assert desired(client)["version"] == 1


def test_a_label_is_kept_taken_off_and_tells_the_agent_nothing(job, client):
    assert say(client, FIRST, label="  before the new data ").json()["label"] == "before the new data"
    assert row(client, FIRST)["label"] == "before the new data"
    assert say(client, FIRST, label="better").json()["label"] == "better"
    assert say(client, FIRST, label=" ").json()["label"] is None
    assert say(client, FIRST, label=None).json()["label"] is None
    assert (desired(client)["version"], desired(client)["pins"]) == (0, None)


def test_what_an_agent_says_later_changes_neither(job, client):
    say(client, FIRST, pinned=True, label="keep")
    job.checkpoint(10, "damaged", reason="a digest does not match")
    job.say(Inventory(at=job.at, checkpoints=[SECOND]))
    told = row(client, FIRST)
    assert (told["state"], told["pinned"], told["label"]) == ("missing", True, "keep")
    assert say(client, FIRST, pinned=False).json()["pinned"] is False


@ON_SQLITE
@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({}, ""),
        ({"label": "x" * 65}, "label"),
        ({"label": "two\nlines"}, "label"),
        ({"label": "\u202eback to front"}, "label"),
        ({"label": 7}, "body"),
        ({"pinned": "yes"}, "body"),
        ({"pinned": None}, "body"),
        ({"colour": "red"}, "body"),
    ],
)
def test_what_cannot_be_is_refused_by_name(job, client, changes, field):
    refused = say(client, FIRST, **changes)
    assert (refused.status_code, refused.json()["field"]) == (422, field)
    assert desired(client)["version"] == 0


def test_64_characters_are_a_label(job, client):
    assert say(client, FIRST, label="ä" * 64).json()["label"] == "ä" * 64


def test_only_what_is_in_the_store_can_be_pinned(job, client):
    job.checkpoint(30, "failed", reason="the disk is full")
    refused = say(client, checkpoint_id(30, 1), pinned=True)
    assert (refused.status_code, refused.json()["error"]) == (409, "not_possible")
    assert "is failed: only a durable checkpoint can be pinned" in refused.json()["message"]


def test_a_job_has_so_many_pins_and_one_more_takes_another_s_place(job, client):
    every = [checkpoint_id(number, 1) for number in range(100, 101 + MAX_PINS)]
    job.say(Inventory(at=job.at, checkpoints=[FIRST, SECOND, *every]))
    for one in every[:MAX_PINS]:
        assert say(client, one, pinned=True).status_code == 200
    refused = say(client, every[-1], pinned=True)
    assert refused.status_code == 409
    assert "char-gpt has 64 pinned checkpoints" in refused.json()["message"]
    say(client, every[0], pinned=False)
    assert say(client, every[-1], pinned=True).status_code == 200
    assert len(desired(client)["pins"]) == MAX_PINS


def test_a_pin_takes_nobody_s_form_away(job, client):
    say(client, FIRST, pinned=True)
    edited = client.patch(f"{JOB}/desired", json={"every": 50}, headers={"If-Match": '"0"'})
    assert edited.status_code == 200
    assert edited.json()["pins"] == [FIRST]


def test_it_is_told_at_which_iteration_a_pin_held(job, client):
    say(client, FIRST, pinned=True)
    job.say(DesiredStateApplied(at=job.at, version=1, iteration=31, lineage=1))
    (edit,) = client.get(f"{JOB}/edits").json()["edits"]
    assert (edit["summary"], edit["who"], edit["applied_iteration"]) == (f"pin {FIRST}", "operator", 31)


def test_each_act_is_in_the_audit_log_once(job, client):
    for changes in ({"pinned": True}, {"pinned": True}, {"label": "keep"}, {"pinned": False, "label": None}):
        say(client, FIRST, **changes)
    entries = client.get("/api/v1/audit").json()["entries"][::-1]
    assert [(one["action"], one["who"], one["job"]) for one in entries] == [
        (f"checkpoint.{act}", "operator", "char-gpt") for act in ("pin", "label", "unpin", "label")
    ]
    assert json.loads(entries[1]["after"]) == {"label": "keep", "checkpoint": FIRST}


def test_pins_that_only_the_store_knows_of_are_learned_from_it(job, client):
    job.say(Inventory(at=job.at, checkpoints=[FIRST, SECOND], pinned=[FIRST, checkpoint_id(5, 1)]))
    told = row(client, FIRST)
    assert (told["pinned"], told["pinned_by"]) == (True, "agent")
    assert desired(client)["pins"] == [FIRST]
    assert client.get(f"{JOB}/edits").json()["edits"] == []


def test_what_the_store_says_late_brings_no_pin_back(job, client):
    say(client, FIRST, pinned=True)
    say(client, FIRST, pinned=False)
    job.say(Inventory(at=job.at, checkpoints=[FIRST, SECOND], pinned=[FIRST]))
    assert desired(client)["pins"] == []


def test_the_timeline_tells_what_is_pinned_and_labelled_however_dense_the_others_lie(job, client):
    job.train(70)
    job.say(Inventory(at=job.at, checkpoints=[FIRST, SECOND, *(checkpoint_id(n, 1) for n in range(30, 90))]))
    say(client, 31, pinned=True)
    say(client, 33, label="keep")
    told = client.get(f"{JOB}/timeline?marks=10").json()
    assert told["checkpoint_density"] is not None
    found = {one["iteration"]: (one["pinned"], one["label"]) for one in told["checkpoints"]}
    assert (found[31], found[33]) == ((True, None), (False, "keep"))
