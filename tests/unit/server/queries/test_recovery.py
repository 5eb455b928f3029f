"""Where a job would go on from if it ended now."""

from __future__ import annotations

import re

import pytest

from holdfast.protocol.field_types import HeldSnapshot
from holdfast.protocol.wire import AttemptFinished, Inventory, LineageStarted, MemoryReport
from holdfast_server.queries.recovery import complete_snapshots
from tests.support.server_fixtures import JOB, ScriptedAgent

PAGE = "/jobs/char-gpt/recovery"
STORES = ["/nvme/checkpoints", "s3://bucket/run"]


def held(iteration, *ranks, world_size=1, lineage=1, origin="a"):
    return HeldSnapshot(id=f"{iteration:012d}-{lineage}", origin=origin, world_size=world_size, ranks=list(ranks))


def report(agent, *snapshots, host="node-1"):
    agent.say(MemoryReport(at=agent.at, host=host, snapshots=list(snapshots)))


def sources(client):
    found = client.get(f"{JOB}/recovery").json()["sources"]
    return {one["place"]: (one["iteration"], one["resumes_from"], one["loses"]) for one in found}


def notes(client):
    return {one["place"]: one["note"] for one in client.get(f"{JOB}/recovery").json()["sources"]}


def rank(agent, number, client):
    return ScriptedAgent(client, rank=number, iteration=agent.iteration)


@pytest.fixture
def job(agent):
    agent.start(stores=STORES, supervised=True, world_size=2)
    agent.train(1243)
    return agent


def test_each_place_has_its_newest_and_what_is_lost_without_those_above(job, client):
    for iteration in (1100, 1200):
        job.checkpoint(iteration)
    ids = [f"{iteration:012d}-1" for iteration in (1100, 1200)]
    job.say(Inventory(at=job.at, checkpoints=ids, copies={ids[0]: "both"}))
    report(job, held(1240, 0, world_size=2), held(1238, 0, 1, world_size=2))
    report(rank(job, 1, client), held(1240, 1, world_size=2), held(1238, 0, 1, world_size=2), host="node-2")
    assert sources(client) == {
        "memory": (1240, 1240, 3), "peers": (1238, 1238, 5), "local": (1200, 1200, 43), "store": (1100, 1100, 143),
    }  # fmt: skip
    assert notes(client) | {"memory": "", "peers": ""} == notes(client)
    assert [notes(client)[place] for place in ("local", "store")] == STORES
    assert client.get(f"{JOB}/recovery").json()["hosts"] == [
        {"host": "node-1", "iteration": 1238}, {"host": "node-2", "iteration": 1238},
    ]  # fmt: skip


def test_a_checkpoint_that_is_only_in_the_store_behind_is_not_in_the_directory(job, client):
    job.checkpoint(1200)
    job.say(Inventory(at=job.at, checkpoints=["000000001200-1"], copies={"000000001200-1": "behind"}))
    assert sources(client) == {
        "memory": (None, 1200, 43), "local": (None, 1200, 43), "store": (1200, 1200, 43),
    }  # fmt: skip


def test_a_start_goes_on_from_what_is_newer_than_memory(job, client):
    job.checkpoint(1240)
    report(job, held(1200, 0, 1, world_size=2))
    assert sources(client)["memory"] == (1200, 1240, 3)


def test_without_checkpoints_it_starts_again(agent, client):
    agent.start()
    agent.train(40)
    assert sources(client) == {"memory": (None, 0, 40), "store": (None, 0, 40)}
    assert notes(client)["memory"] == "not kept: start the job with holdfast run"


def test_snapshots_of_an_abandoned_lineage_do_not_count(job, client):
    job.checkpoint(1000)
    report(job, held(1240, 0, 1, world_size=2))
    job.lineage, job.iteration = 2, 1000
    job.say(LineageStarted(at=job.at, iteration=1000, lineage=2, parent="000000001000-1"))
    job.train(10)
    assert sources(client)["memory"] == (None, 1000, 10)
    report(job, held(1005, 0, 1, world_size=2, lineage=2))
    assert sources(client)["memory"] == (1005, 1005, 5)


def test_reports_of_an_earlier_attempt_do_not_count(job, client):
    report(job, held(1240, 0, 1, world_size=2))
    following = job.restarted()
    following.start(world_size=2)
    assert sources(client)["memory"][0] is None
    report(job, held(1240, 0, 1, world_size=2))
    assert sources(client)["memory"][0] is None


def test_memory_is_freed_when_the_job_ends(job, client):
    report(job, held(1240, 0, 1, world_size=2))
    job.say(AttemptFinished(at=job.at, iteration=1243, lineage=1, reason="finished"))
    assert sources(client)["memory"][0] is None
    assert notes(client)["memory"] == "freed when the job ended"


def test_parts_of_two_tries_or_of_too_few_ranks_are_no_snapshot():
    half = [held(iteration, 0, world_size=2) for iteration in (8, 9)]
    hosts = {"a": half, "b": [held(9, 1, world_size=2, origin="x")]}
    assert complete_snapshots(hosts, 1) == []
    hosts["b"].append(held(8, 1, world_size=2))
    (found,) = complete_snapshots(hosts, 1)
    assert (found.iteration, found.needs) == (8, {"a", "b"})


def test_a_host_is_needed_only_where_it_alone_holds_a_part():
    parts = {"a": (0, 2), "b": (1, 0), "c": (2,)}
    hosts = {host: [held(9, *ranks, world_size=3)] for host, ranks in parts.items()}
    assert [found.needs for found in complete_snapshots(hosts, 1)] == [{"b"}]


def test_the_panel_shows_them_in_the_order_of_a_start(job, client):
    job.checkpoint(1200)
    report(job, held(1240, 0, 1, world_size=2))
    part = client.get(PAGE, headers={"HX-Request": "true"}).text
    assert "<html" not in part
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", part))
    assert "the processes end 1,240 3 Memory of the host: 1,240" in text
    assert "all memory is lost 1,200 43 Local directory: 1,200 /nvme/checkpoints" in text
    assert "Store behind it: none, nothing copied yet" in text
    assert "<html" in client.get(PAGE).text


def test_an_unknown_job_is_not_found(client):
    assert client.get(f"{JOB}/recovery").status_code == 404


def test_a_wrong_number_of_ranks_takes_no_memory():
    assert complete_snapshots({"node-1": [held(10, 0, 1, world_size=2**53)]}, 1) == []
    assert [one.iteration for one in complete_snapshots({"node-1": [held(10, 0, 1, world_size=2)]}, 1)] == [10]
