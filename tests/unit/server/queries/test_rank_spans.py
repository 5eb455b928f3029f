"""What each rank's own part of a checkpoint took, from rank 0's report to the timeline."""

from __future__ import annotations

import math

from holdfast.protocol.field_types import RankCheckpointTimes

JOB = "/api/v1/jobs/char-gpt"


def spans(*persist: float) -> list[RankCheckpointTimes]:
    return [
        RankCheckpointTimes(rank=rank, snapshot_seconds=0.1, stall_seconds=0.01, persist_seconds=seconds)
        for rank, seconds in enumerate(persist)
    ]


def test_the_timeline_tells_the_slowest_ranks_of_few_checkpoints(agent, client):
    agent.start(world_size=12)
    agent.train(10)
    agent.checkpoint(ranks=spans(*(12.0 - rank for rank in range(12))))
    agent.train(10)
    (told,) = client.get(f"{JOB}/timeline").json()["checkpoints"]
    assert [(one["rank"], one["persist_seconds"]) for one in told["ranks"]] == [(n, 12.0 - n) for n in range(8)]
    (listed,) = client.get(f"{JOB}/checkpoints").json()["checkpoints"]
    assert listed["ranks"] == []


def test_of_many_checkpoints_no_rank_is_told_of(agent, client):
    agent.start(world_size=2)
    for _ in range(61):
        agent.train(2)
        agent.checkpoint(ranks=spans(2.0, 1.0))
    told = client.get(f"{JOB}/timeline").json()["checkpoints"]
    assert len(told) == 61
    assert all(one["ranks"] == [] for one in told)


def test_a_figure_that_cannot_be_is_left_out_and_the_others_stay(agent, client):
    agent.start(world_size=3)
    agent.train(10)
    agent.checkpoint(ranks=spans(math.nan, 2.0, -1.0))
    (told,) = client.get(f"{JOB}/timeline").json()["checkpoints"]
    assert [one["rank"] for one in told["ranks"]] == [1]


def test_damage_found_later_leaves_what_its_ranks_took(agent, client):
    agent.start(world_size=2)
    agent.train(10)
    agent.checkpoint(ranks=spans(2.0, 1.0))
    agent.checkpoint(state="damaged", reason="a digest does not match")
    (told,) = client.get(f"{JOB}/timeline").json()["checkpoints"]
    assert (told["state"], len(told["ranks"])) == ("damaged", 2)
