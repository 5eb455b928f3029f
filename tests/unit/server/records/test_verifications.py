"""Checkpoints that people have read back: how a request travels, and what is kept of what the job finds."""

from __future__ import annotations

import math

import msgspec
import pytest

from holdfast.protocol.ids import checkpoint_id
from holdfast.protocol.wire import (
    MAX_OPEN_VERIFICATIONS,
    DesiredStateApplied,
    Inventory,
    TensorNorms,
    VerificationReport,
)

JOB = "/api/v1/jobs/char-gpt"
FIRST, SECOND = checkpoint_id(10, 1), checkpoint_id(20, 1)


def ask(client, checkpoint=FIRST, **body):
    return client.post(f"{JOB}/checkpoints/{checkpoint}/verification", json=body)


def told(client, checkpoint=FIRST):
    return client.get(f"{JOB}/checkpoints/{checkpoint}/verification").json()


def wanted(client):
    found = client.get(f"{JOB}/desired").json()["verify"]
    return [(each["id"], each["checkpoint"], each["against"]) for each in found]


def state_of(client, checkpoint=FIRST):
    rows = client.get(f"{JOB}/checkpoints").json()["checkpoints"]
    return next((row["state"], row["restorable"]) for row in rows if row["id"] == checkpoint)


def says(agent, request, verdict=None, checkpoint=FIRST, **more):
    agent.at += 1
    agent.say(
        VerificationReport(
            at=agent.at, request=request, checkpoint=checkpoint, verdict=verdict, host="node-1", **more
        )
    )


def norms(scale=1.0, **more):
    columns = {
        "name": ["model.a", "model.b", "model.c"], "elements": [4, 5, 6],
        "norm": [2.0 * scale, 3.0, 4.0], "largest": [1.0, 1.0, 1.0], "nan": [0, 0, 2], "inf": [0, 0, 0],
    }  # fmt: skip
    return TensorNorms(**columns | more)


def test_nobody_has_asked_until_somebody_does(job, client):
    assert told(client)["state"] == "unasked"
    assert wanted(client) == []


def test_a_request_reaches_the_job_and_goes_when_it_has_its_verdict(job, client, clock):
    asked = ask(client).json()
    assert (asked["state"], asked["asked_by"], asked["asked_at"]) == ("requested", "operator", clock())
    assert wanted(client) == [(1, FIRST, None)]
    says(job, 1, read_bytes=100, total_bytes=400)
    reading = told(client)
    assert (reading["state"], reading["host"], reading["read_bytes"]) == ("reading", "node-1", 100)
    assert wanted(client) == [(1, FIRST, None)]
    says(job, 1, "sound", read_bytes=400, total_bytes=400, seconds=2.5)
    done = told(client)
    assert (done["state"], done["verdict"], done["verified_at"]) == ("sound", "sound", job.at)
    assert (done["verified_host"], done["seconds"], done["asked_by"]) == ("node-1", 2.5, "operator")
    assert wanted(client) == []
    assert state_of(client) == ("durable", True)


def test_asked_twice_it_is_read_once_and_asked_again_once_more(job, client):
    ask(client)
    ask(client)
    assert wanted(client) == [(1, FIRST, None)]
    says(job, 1, "sound")
    ask(client)
    ((request, _, _),) = wanted(client)
    assert request > 1
    says(job, 1, "sound")  # once more, from a spool
    assert told(client)["state"] == "requested"
    says(job, request, "failed", reason="the store is away")
    after = told(client)
    assert (after["state"], after["reason"], after["verdict"]) == ("failed", "the store is away", "sound")


def test_they_wait_in_the_order_they_were_asked_in_and_not_too_many(job, client):
    more = [checkpoint_id(number, 1) for number in range(100, 100 + MAX_OPEN_VERIFICATIONS)]
    job.say(Inventory(at=job.at, checkpoints=[FIRST, SECOND, *more]))
    for each in more:
        assert ask(client, each).status_code == 200
    assert [checkpoint for _, checkpoint, _ in wanted(client)] == more
    refused = ask(client)
    assert (refused.status_code, refused.json()["error"]) == (409, "not_possible")
    says(job, 1, "sound", checkpoint=more[0])
    assert ask(client).status_code == 200


def test_a_damaged_one_is_damaged_everywhere_until_it_is_read_as_sound(job, client):
    ask(client)
    reason = "rank-0.safetensors: tensor model.a does not match its digest"
    job.checkpoint(10, "damaged", reason=reason)
    says(job, 1, "damaged", reason=reason)
    assert (told(client)["verdict"], told(client)["reason"]) == ("damaged", reason)
    assert state_of(client) == ("damaged", False)
    refused = client.post(f"{JOB}/restores", json={"checkpoint": FIRST})
    assert (refused.status_code, refused.json()["error"]) == (409, "not_restorable")
    job.say(Inventory(at=job.at, checkpoints=[FIRST, SECOND]))
    assert state_of(client) == ("damaged", False)
    request = ask(client).json()["request"]  # somebody has put a copy of the file back
    says(job, request, "sound")
    assert state_of(client) == ("durable", True)


def test_a_request_is_taken_back_and_what_was_found_before_stays(job, client):
    ask(client)
    says(job, 1, "sound")
    ask(client)
    assert wanted(client) != []
    gone = client.delete(f"{JOB}/checkpoints/{FIRST}/verification").json()
    assert (gone["state"], gone["verdict"], gone["reason"]) == ("cancelled", "sound", "cancelled by operator")
    assert wanted(client) == []
    assert client.delete(f"{JOB}/checkpoints/{FIRST}/verification").json() == gone


def test_only_what_is_in_the_store_can_be_read_and_not_beside_itself(job, client):
    job.checkpoint(30, "failed", reason="the disk is full")
    for body in ({}, {"against": FIRST}):
        refused = ask(client, checkpoint_id(30, 1), **body)
        assert (refused.status_code, refused.json()["error"]) == (409, "not_possible")
    assert ask(client, FIRST, against="30").status_code == 404
    assert ask(client, FIRST, against=checkpoint_id(30, 1)).status_code == 409
    assert ask(client, FIRST, against="10").status_code == 409
    assert ask(client, FIRST, beside="20").status_code == 422
    assert wanted(client) == []


def test_an_unknown_one_offers_the_nearest(job, client):
    refused = ask(client, "25")
    assert (refused.status_code, refused.json()["nearest"]["id"]) == (404, SECOND)
    assert ask(client, "20").json()["checkpoint"] == SECOND


def test_a_request_takes_nobody_s_form_away_and_is_in_the_history_and_the_log(job, client):
    ask(client, SECOND, against=FIRST)
    edited = client.patch(f"{JOB}/desired", json={"every": 50}, headers={"If-Match": '"0"'})
    assert edited.status_code == 200
    job.say(DesiredStateApplied(at=job.at, version=1, iteration=31, lineage=1))
    says(job, 1, "sound", checkpoint=SECOND)
    edits = client.get(f"{JOB}/edits").json()["edits"]
    assert [edit["summary"] for edit in edits if "verify" in edit["summary"]] == [
        f"verify {SECOND} compared with {FIRST}"
    ]
    (entry,) = [one for one in client.get("/api/v1/audit").json()["entries"] if "verify" in one["action"]]
    assert (entry["action"], entry["who"]) == ("checkpoint.verify", "operator")
    assert msgspec.json.decode(entry["after"]) == {"checkpoint": SECOND, "against": FIRST}


def test_a_late_verdict_does_not_take_back_a_newer_one(job, client):
    ask(client)
    says(job, 1, "damaged", reason="a digest does not match")
    at = job.at
    request = ask(client).json()["request"]
    says(job, request, "sound")
    job.say(VerificationReport(at=at, request=1, checkpoint=FIRST, verdict="damaged", host="node-2"))
    assert (told(client)["verdict"], told(client)["verified_host"]) == ("sound", "node-1")


def test_what_an_agent_says_of_what_nobody_asked_is_no_verdict(job, client):
    says(job, 7, "sound")
    assert told(client)["state"] == "unasked"


def tensors(client, checkpoint=SECOND, other=FIRST):
    return client.get(f"{JOB}/checkpoints/{checkpoint}/tensors", params={"with": other} if other else {}).json()


def test_tensors_are_kept_with_the_verdict_and_those_not_finite_come_first(job, client):
    assert tensors(client, other=None)["missing"] == [SECOND]
    ask(client, SECOND)
    says(job, 1, "sound", checkpoint=SECOND, tensors=norms(left_out=3))
    table = tensors(client, other=None)
    assert (table["measure"], table["missing"], table["left_out"]) == ("none", [], 3)
    assert table["rows"][0]["name"] == "model.c"
    assert table["rows"][1] == {
        "name": "model.a", "elements": 4, "norm": 2.0, "largest": 1.0, "nan": 0, "inf": 0,
        "other_norm": None, "distance": None, "change": None,
    }  # fmt: skip


def test_two_that_were_summed_up_are_compared_by_their_norms(job, client):
    for number, (checkpoint, found) in enumerate({FIRST: norms(), SECOND: norms(1.5)}.items()):
        request = ask(client, checkpoint).json()["request"]
        says(job, request, "sound", checkpoint=checkpoint, tensors=found)
        assert tensors(client)["measure"] == ("none", "norms")[number]
    rows = tensors(client)["rows"]
    assert [(row["name"], row["change"], row["distance"]) for row in rows] == [
        ("model.c", 0.0, None), ("model.a", 0.5, None), ("model.b", 0.0, None),
    ]  # fmt: skip


def test_read_beside_each_other_the_difference_is_told_from_either_side(job, client):
    ask(client, SECOND, against="10")
    assert wanted(client) == [(1, SECOND, FIRST)]
    beside = {"other_norm": [4.0, 0.0, math.nan], "distance": [1.0, 3.0, math.nan]}
    says(job, 1, "sound", checkpoint=SECOND, tensors=norms(**beside), against=FIRST)
    table = tensors(client)
    assert table["measure"] == "difference"
    found = {row["name"]: (row["distance"], row["change"]) for row in table["rows"]}
    assert found == {"model.c": (None, None), "model.b": (3.0, "inf"), "model.a": (1.0, 0.25)}
    assert [row["name"] for row in table["rows"]] == ["model.c", "model.b", "model.a"]
    request = ask(client, FIRST).json()["request"]
    says(job, request, "sound", checkpoint=FIRST, tensors=norms(2.0))
    back = {row["name"]: row["change"] for row in tensors(client, FIRST, SECOND)["rows"]}
    assert (tensors(client, FIRST, SECOND)["measure"], back["model.a"]) == ("difference", 0.5)


@pytest.mark.parametrize(
    "broken", [{"norm": [1.0]}, {"norm": b"\0" * 24}, {"distance": [1.0]}, {"name": ["a"] * 2001}]
)
def test_a_table_that_is_none_is_left_out_and_the_verdict_stands(job, client, broken):
    ask(client, SECOND)
    says(job, 1, "sound", checkpoint=SECOND, tensors=norms(**broken))
    assert told(client, SECOND)["verdict"] == "sound"
    assert tensors(client, other=None)["rows"] == []


# ---- scrubs ----------------------------------------------------------------------------------------


def scrub(client, state, checkpoint=FIRST, **more):
    body = {"state": state, "host": "node-9", "read_bytes": 1000, "seconds": 2.0, **more}
    return client.put(f"{JOB}/checkpoints/{checkpoint}/scrub", json=body)


@pytest.mark.parametrize("found", ["repairable", "damaged"])
def test_damage_that_a_scrub_leaves_makes_a_checkpoint_damaged_until_it_is_repaired(job, client, found):
    reply = scrub(client, found, reason="rank-0.safetensors damaged: bytes 0 to 4,096")
    assert reply.status_code == 200
    seen = reply.json()
    assert (seen["verdict"], seen["state"], seen["verified_host"]) == ("damaged", "damaged", "node-9")
    assert seen["reason"] == "rank-0.safetensors damaged: bytes 0 to 4,096"
    assert state_of(client) == ("damaged", False)
    assert state_of(client, SECOND) == ("durable", True)
    assert scrub(client, "repaired").json()["verdict"] == "sound"
    assert state_of(client) == ("durable", True)


def test_a_scrub_leaves_an_open_request_to_the_job(job, client, agent):
    ask(client)
    seen = scrub(client, "sound").json()
    assert (seen["verdict"], seen["state"]) == ("sound", "requested")
    assert len(wanted(client)) == 1


def test_a_checkpoint_that_retention_removed_is_not_brought_back_by_a_scrub(job, client, agent):
    agent.say(Inventory(at=agent.at, checkpoints=[SECOND], deleted={FIRST: "the oldest of 3"}))
    for found in ("damaged", "sound"):
        scrub(client, found)
        assert state_of(client) == ("missing", False)


def test_scrubs_are_counted_by_result(job, client):
    for found in ("sound", "repaired", "repaired"):
        scrub(client, found)
    text = client.get("/metrics").text
    assert 'holdfast_checkpoint_scrubs_total{result="repaired"} 2.0' in text
    assert 'holdfast_checkpoint_scrubs_total{result="sound"} 1.0' in text


@pytest.mark.parametrize("body", [{"state": "perfect"}, {"read_bytes": -1}, {"reason": "x" * 1001}, {"more": 1}])
def test_a_report_of_a_scrub_that_is_not_valid_is_refused(job, client, body):
    assert scrub(client, **{"state": "sound", **body}).status_code == 422


def test_a_scrub_of_what_the_server_does_not_know_is_not_found(job, client):
    assert scrub(client, "sound", checkpoint_id(77, 1)).status_code == 404
