"""An attempt that does not know that a newer one has begun has no more say; its spool, written before, has."""

from __future__ import annotations

import msgspec
import pytest

from holdfast.protocol.wire import Batch, Notice, OrderStateChange
from holdfast_server.ingest.transaction import OVERLAP_SECONDS

JOB = "/api/v1/jobs/char-gpt"


@pytest.fixture
def newer(agent):
    """A second attempt, which began 60 s after the first was heard of last."""
    agent.start()
    agent.train(10)
    second = agent.restarted()
    second.start(previous_exit="killed by SIGKILL")
    second.train(5)
    return second


def post(client, body):
    return client.post("/api/v1/ingest", content=body, headers={"Content-Type": "application/msgpack"})


def said(agent, at, *events, rank=0):
    """What the server answers to a batch that an attempt has written at that time."""
    batch = Batch(
        job=agent.job, uid=agent.uid, attempt=agent.attempt, rank=rank, sequence=agent.sequence, sent_at=at,
        iteration=agent.iteration, lineage=agent.lineage, events=list(events),
    )  # fmt: skip
    agent.sequence += 1
    return post(agent.client, msgspec.msgpack.encode(batch))


def notice(at):
    return Notice(at=at, iteration=10, lineage=1, level="info", code="x", message="from the old one")


@pytest.mark.parametrize("rank", [0, 1])
def test_what_an_old_life_says_after_a_newer_one_began_is_refused(agent, newer, client, rank):
    late = newer.at + OVERLAP_SECONDS + 1
    before = client.get(JOB).json()
    reply = said(agent, late, notice(late), rank=rank)
    assert (reply.status_code, reply.json()["error"]) == (409, "fenced")
    assert "attempt 2 of char-gpt has superseded attempt 1" in reply.json()["message"]
    assert client.get(JOB).json() == before
    assert client.get(f"{JOB}/notices").json()["notices"] == []


def test_a_sign_of_life_of_an_old_one_is_refused_as_well(agent, newer):
    assert said(agent, newer.at + OVERLAP_SECONDS + 1).status_code == 409


def test_it_ends_no_order(agent, newer, client):
    agent.at = newer.at + 60
    newer.checkpoint(15)
    placed = client.post(f"{JOB}/restores", json={"iteration": 15}).json()
    moved = OrderStateChange(
        at=agent.at, order=placed["id"], state="failed", iteration=10, lineage=1, reason="fenced"
    )
    assert said(agent, agent.at, moved).status_code == 409
    assert client.get(f"{JOB}/restores/{placed['id']}").json()["state"] == "requested"


def test_the_spool_of_a_dead_one_is_taken(agent, newer, client):
    assert said(agent, newer.at - 1, notice(newer.at - 1)).status_code == 200
    assert len(client.get(f"{JOB}/notices").json()["notices"]) == 1


def test_the_first_that_came_after_it_counts_however_many_do(agent, newer):
    third = newer.restarted("third")
    third.start()
    assert said(agent, newer.at + OVERLAP_SECONDS + 1).status_code == 409
    assert said(newer, newer.at + OVERLAP_SECONDS + 1).status_code == 200


def test_what_was_taken_before_is_acknowledged_again(agent, newer):
    assert post(agent.client, agent.sent[-1]).status_code == 200


def test_a_job_whose_store_was_deleted_counts_anew_and_is_heard(agent, newer, fresh_agent):
    anew = fresh_agent(agent.client, uid="anew", attempt=1, at=newer.at + 600)
    anew.start()
    assert said(anew, anew.at + 60).status_code == 200
