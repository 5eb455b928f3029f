"""Where the ranks of the newest attempt run."""

from __future__ import annotations

from dataclasses import replace

from holdfast.protocol.wire import RankPlace

JOB = "/api/v1/jobs/char-gpt"


def place(agent, host, **fields):
    agent.say(RankPlace(at=agent.at, host=host, **fields))


def report_ranks(agent, client):
    """Have two ranks report iterations and their places."""
    agent.start(world_size=2)
    agent.train(30, seconds=1.0)
    place(agent, "gpu-1", device="NVIDIA H200, cuda:0", scheduler_job="Slurm job 4711")
    second = replace(agent, rank=1, sequence=0, iteration=0, sent=[])
    second.train(30, seconds=1.0)
    place(second, "gpu-2")


def test_each_rank_has_its_host_its_device_and_its_job_of_the_scheduler(agent, client, clock):
    report_ranks(agent, client)
    ranks = {row["rank"]: row for row in client.get(f"{JOB}/ranks?window=1h").json()["ranks"]}
    assert [ranks[0][name] for name in ("host", "device", "scheduler_job")] == [
        "gpu-1", "NVIDIA H200, cuda:0", "Slurm job 4711",
    ]  # fmt: skip
    assert [ranks[1][name] for name in ("host", "device", "scheduler_job")] == ["gpu-2", "", ""]
    assert "NVIDIA H200, cuda:0, Slurm job 4711" in client.get("/jobs/char-gpt/ranks?window=1h").text
    assert "NVIDIA H200, cuda:0, Slurm job 4711" in client.get("/jobs/char-gpt/attempts").text


def test_places_of_an_earlier_attempt_are_not_those_of_the_newest(agent, client, clock):
    report_ranks(agent, client)
    second = agent.restarted()
    second.start(world_size=2)
    second.train(30, seconds=1.0)
    ranks = client.get(f"{JOB}/ranks?window=1h").json()["ranks"]
    assert [(row["rank"], row["host"]) for row in ranks] == [(0, "")]


def test_a_job_is_deleted_with_its_places(agent, client, clock):
    report_ranks(agent, client)
    clock.now += 1e6
    assert client.delete(JOB).status_code == 204
