"""What becomes of checkpoints whose attempt did not live to say."""

from __future__ import annotations

import pytest
from sqlalchemy import event

from holdfast.protocol.ids import checkpoint_id
from holdfast.protocol.wire import AttemptFinished, Checkpoint, Inventory
from holdfast_server import models

JOB = "/api/v1/jobs/char-gpt"
ENDED = "the attempt ended before it was durable"


@pytest.fixture
def killed(agent):
    """Was killed at iteration 10, with one checkpoint being copied and another being written."""
    agent.start()
    agent.train(10)
    agent.checkpoint(6, "durable")
    agent.checkpoint(8, "persisting")
    agent.checkpoint(10, "snapshot")
    return agent


def states(client):
    return {one["iteration"]: one["state"] for one in client.get(f"{JOB}/checkpoints").json()["checkpoints"]}


def late(agent, iteration, state, sequence):
    """A batch of the killed attempt that its spool brings later."""
    agent.sequence = sequence
    return agent.checkpoint(iteration, state)


def test_what_a_killed_attempt_left_half_done_fails_when_the_next_one_starts(killed, client):
    assert states(client) == {6: "durable", 8: "persisting", 10: "snapshot"}
    killed.restarted().start()
    assert states(client) == {6: "durable", 8: "failed", 10: "failed"}
    reasons = {one["iteration"]: one["reason"] for one in client.get(f"{JOB}/checkpoints").json()["checkpoints"]}
    assert reasons == {6: None, 8: ENDED, 10: ENDED}


def test_what_the_next_attempt_finds_in_the_store_was_committed_after_all(killed, client):
    second = killed.restarted()
    second.start()
    second.say(Inventory(at=second.at, checkpoints=[checkpoint_id(6, 1), checkpoint_id(8, 1)]))
    assert states(client) == {6: "durable", 8: "durable", 10: "failed"}
    assert client.post(f"{JOB}/restores", json={"iteration": 8}).status_code == 201


def test_what_an_attempt_has_under_way_when_it_ends_comes_to_nothing(killed, client):
    killed.say(AttemptFinished(at=killed.at, iteration=10, lineage=1, reason="interrupted"))
    assert states(client) == {6: "durable", 8: "failed", 10: "failed"}


def test_what_the_running_attempt_has_under_way_is_left_alone(killed, client):
    second = killed.restarted()
    second.start()
    second.train(2)
    second.checkpoint(12, "persisting")
    killed.sequence = 50
    killed.say(AttemptFinished(at=killed.at, iteration=10, lineage=1, reason="finished"))
    assert states(client)[12] == "persisting"


def test_a_late_word_of_the_killed_attempt_does_not_bring_it_back_under_way(killed, client):
    killed.restarted().start()
    late(killed, 10, "persisting", 50)
    late(killed, 12, "snapshot", 51)
    assert states(client) == {6: "durable", 8: "failed", 10: "failed", 12: "failed"}


def test_a_late_word_that_it_was_durable_counts(killed, client):
    killed.restarted().start()
    late(killed, 10, "durable", 50)
    assert states(client)[10] == "durable"


def test_the_same_iteration_taken_again_is_a_checkpoint_of_its_own(killed, client):
    second = killed.restarted()
    second.start()
    second.checkpoint(10, "persisting")
    assert states(client)[10] == "persisting"
    second.checkpoint(10, "durable")
    assert states(client)[10] == "durable"


def test_a_checkpoint_known_by_its_name_only_can_be_restored_from_the_page(agent, client):
    agent.start()
    agent.train(20)
    agent.say(Inventory(at=agent.at, checkpoints=[checkpoint_id(15, 1)]))
    (row,) = client.get(f"{JOB}/checkpoints").json()["checkpoints"]
    assert (row["iteration"], row["lineage"], row["restorable"]) == (15, 1, True)
    assert (row["payload_bytes"], row["snapshot_seconds"], row["persist_seconds"]) == (0, None, None)
    page = "/jobs/char-gpt"
    assert "Restore iteration 15, lineage 1" in client.get(page).text
    assert client.get(f"{page}/restore?checkpoint={row['id']}").status_code == 200
    assert client.post(f"{page}/restores", data={"checkpoint": row["id"], "key": "click"}).status_code == 200
    assert client.get(f"{JOB}/desired").json()["restore"]["checkpoint"] == row["id"]


def described(iteration, at, **more):
    return Checkpoint(
        at=at, id=checkpoint_id(iteration, 1), iteration=iteration, lineage=1, state="durable",
        **{"kind": "final", "payload_bytes": 290_000, "reused_bytes": 1000} | more,
    )  # fmt: skip


def test_a_checkpoint_learned_from_the_store_has_the_time_and_size_of_its_manifest(agent, client):
    agent.start()
    agent.train(20)
    taken = agent.at - 2820
    agent.say(Inventory(at=agent.at, checkpoints=[checkpoint_id(15, 1)]))
    agent.say(described(15, taken))
    (row,) = client.get(f"{JOB}/checkpoints").json()["checkpoints"]
    assert (row["at"], row["payload_bytes"], row["reused_bytes"], row["kind"]) == (taken, 290_000, 1000, "final")
    assert client.get(JOB).json()["last_durable"]["at"] == taken
    dialog = " ".join(client.get(f"/jobs/char-gpt/restore?checkpoint={row['id']}").text.split())
    assert "final, 290 kB" in dialog
    agent.say(Inventory(at=agent.at, checkpoints=[row["id"]]))
    assert client.get(f"{JOB}/checkpoints").json()["checkpoints"] == [row]


def test_a_manifest_replaces_neither_what_the_attempt_reported_nor_damage(agent, client):
    agent.start()
    agent.train(20)
    agent.checkpoint(10, snapshot_started_at=agent.at - 1)
    agent.checkpoint(20)
    agent.checkpoint(20, "damaged", reason="a digest does not match")
    before = client.get(f"{JOB}/checkpoints").json()["checkpoints"]
    agent.say(described(10, agent.at - 500), described(20, agent.at - 500))
    assert client.get(f"{JOB}/checkpoints").json()["checkpoints"] == before


def test_one_batch_may_start_an_attempt_and_list_what_it_found(killed, client):
    second = killed.restarted()
    second.say(
        Inventory(at=second.at, checkpoints=[checkpoint_id(8, 1)]),
        Checkpoint(at=second.at, id=checkpoint_id(10, 1), iteration=10, lineage=1, kind="final", state="durable"),
    )
    assert states(client) == {6: "missing", 8: "durable", 10: "durable"}


def test_what_retention_deleted_before_the_process_was_killed_is_retired(killed, client):
    """The attempt that deleted it could not report that, and the next one lists only what is left."""
    killed.checkpoint(7)
    killed.checkpoint(14)
    client.patch(f"{JOB}/checkpoints/{checkpoint_id(7, 1)}", json={"pinned": True}).raise_for_status()
    second = killed.restarted()
    second.say(Inventory(at=second.at, checkpoints=[checkpoint_id(8, 1)]))
    rows = {row["iteration"]: row for row in client.get(f"{JOB}/checkpoints").json()["checkpoints"]}
    reason = "deleted by retention: inferred, since attempt 1 ended before it could report that"
    assert (rows[6]["state"], rows[6]["reason"]) == ("missing", reason)
    assert rows[7]["reason"] == rows[14]["reason"] == "it is no longer in the store"  # pinned; newer than all
    assert "retired" in client.get(f"/jobs/char-gpt/checkpoints/{checkpoint_id(6, 1)}").text


def test_the_running_attempt_says_itself_what_retention_deleted(agent, client):
    agent.start()
    agent.train(20)
    gone, told, left = (agent.checkpoint(iteration) for iteration in (5, 10, 15))
    agent.say(Inventory(at=agent.at, checkpoints=[left], deleted={told: "not kept by 'last 1'"}))
    reasons = {row["id"]: row["reason"] for row in client.get(f"{JOB}/checkpoints").json()["checkpoints"]}
    assert reasons == {
        gone: "it is no longer in the store", told: "deleted by retention: not kept by 'last 1'", left: None,
    }  # fmt: skip


def test_an_inventory_says_where_copies_are(agent, client):
    here, both, behind = (checkpoint_id(number, 1) for number in (5, 10, 15))
    agent.start()
    agent.say(Inventory(at=agent.at, checkpoints=[here, both, behind], copies={both: "both", behind: "behind"}))

    def places():
        rows = client.get(f"{JOB}/checkpoints").json()["checkpoints"]
        return {row["id"]: row.get("copy_place") for row in rows}

    assert places() == {here: None, both: "both", behind: "behind"}
    agent.say(Inventory(at=agent.at, checkpoints=[both, behind], copies={both: "behind"}))
    assert places()[both] == "behind"


def test_an_inventory_looks_at_what_it_may_change_and_not_at_all_that_ever_was(agent, client):
    """One comes with each checkpoint that retention takes; a long job has had thousands."""
    agent.start()
    agent.train(40)
    names = [agent.checkpoint(iteration) for iteration in range(1, 41)]
    agent.say(Inventory(at=agent.at, checkpoints=names[-2:]))
    looked_at = []

    def note(row, _):
        looked_at.append(row.id)

    event.listen(models.CheckpointRecord, "load", note)
    try:
        agent.say(Inventory(at=agent.at, checkpoints=[names[3], names[-1], checkpoint_id(41, 1)]))
    finally:
        event.remove(models.CheckpointRecord, "load", note)
    assert set(looked_at) == {names[3], *names[-2:]}
    rows = client.get(f"{JOB}/checkpoints", params={"limit": 50}).json()["checkpoints"]
    assert {row["id"]: row["state"] for row in rows} == {
        name: "durable" if name in (names[3], names[-1]) else "missing" for name in names
    } | {checkpoint_id(41, 1): "durable"}
