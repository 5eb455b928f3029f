"""Forks: which job began with a checkpoint of which other, and who may be told."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import httpx2
import pytest

from holdfast.protocol.ids import checkpoint_id
from holdfast.protocol.wire import AttemptFinished, Inventory, LineageStarted, Origin
from holdfast_server.core.principal import Role
from tests.support.accounts_server import OTHER, OWN

POINT = checkpoint_id(10, 1)
ORIGIN = Origin(job="char-gpt", checkpoint=POINT, digest="9f86d081884c7d65")


def fork(agent, job="branch", origin=ORIGIN):
    """A job that says where it comes from, as it does at every start."""
    agent = replace(agent, job=job, uid=f"{job}-1", lineage=2, iteration=10, sequence=0, sent=[])
    agent.start(resumed_from=POINT)
    agent.say(
        LineageStarted(at=agent.at, lineage=2, iteration=10, parent=POINT, origin=origin),
        Inventory(at=agent.at, checkpoints=[POINT]),
    )
    return agent


@pytest.fixture
def job(agent):
    agent.start()
    agent.train(10)
    agent.checkpoint()
    return agent


def family(client, job):
    return client.get(f"/api/v1/jobs/{job}/forks").json()


def test_both_jobs_know_of_each_other(job, client):
    assert family(client, "char-gpt") == {"origin": None, "forks": []}
    agent = fork(job)
    fork(job, "another")
    forks = family(client, "char-gpt")["forks"]
    assert [each["job"] for each in forks] == ["another", "branch"]
    assert forks[1] == {
        "job": "branch", "project": "default", "checkpoint": POINT, "iteration": 10, "lineage": 2, "at": agent.at,
    }  # fmt: skip
    assert family(client, "branch")["origin"] == {
        "job": "char-gpt", "project": "default", "checkpoint": POINT, "iteration": 10, "lineage": 1,
        "digest": ORIGIN.digest,
    }  # fmt: skip


def test_where_it_comes_from_outlives_its_later_starts_and_restores(job, client):
    agent = fork(job)
    agent.say(LineageStarted(at=agent.at + 9, lineage=2, iteration=10, parent=POINT))  # of an older agent
    agent.say(LineageStarted(at=agent.at + 9, lineage=3, iteration=10, parent=POINT))
    assert family(client, "branch")["origin"]["job"] == "char-gpt"
    assert len(family(client, "char-gpt")["forks"]) == 1


def test_a_job_that_never_reported_here_is_named_all_the_same(agent, client):
    fork(agent)
    origin = family(client, "branch")["origin"]
    assert (origin["job"], origin["project"]) == ("char-gpt", None)


@pytest.mark.parametrize(
    "origin",
    [Origin(job="../x", checkpoint=POINT, digest=""), Origin(job="a", checkpoint="x", digest=""),
     Origin(job="a", checkpoint="", digest="")],
)  # fmt: skip
def test_an_origin_that_is_none_is_left_out(job, client, origin):
    fork(job, origin=origin)
    assert family(client, "branch")["origin"] is None


def test_a_fork_that_was_made_and_not_started_is_there_and_nothing_failed(job, client):
    agent = fork(job)
    agent.say(AttemptFinished(at=agent.at, iteration=10, lineage=2, reason="forked"))
    shown = client.get("/api/v1/jobs/branch").json()
    assert (shown["status"], shown["status_reason"]) == ("stopped", "forked at iteration 10")
    agent.restarted().start()
    assert client.get("/api/v1/jobs/branch").json()["restarts"] == 0


@pytest.fixture
def hidden(stage, fresh_agent):
    """The stage, with a job "ours" that was forked from one of another project, "secret"."""
    client = stage.client
    stage.project(OWN)
    stage.project(OTHER)
    client.headers.update(stage.bearer("report", project=OTHER))
    secret = fresh_agent(client, job="secret")
    secret.start()
    secret.train(10)
    secret.checkpoint()
    client.headers.update(stage.bearer("report", project=OWN))
    ours = fork(secret, "ours", Origin(job="secret", checkpoint=POINT, digest="x"))
    ours.train(10)
    ours.checkpoint()
    client.headers.pop("Authorization")
    return stage


def test_nobody_is_told_of_jobs_of_a_project_that_they_may_not_see(hidden):
    client = hidden.client
    viewer = hidden.cookie(hidden.person("vic", Role.viewer))
    seen = client.get("/api/v1/jobs/ours/forks", headers=viewer).json()
    assert (seen["origin"]["job"], seen["origin"]["project"]) == (None, None)
    for page in ("/jobs/ours", f"/jobs/ours/checkpoints/{POINT}"):
        text = " ".join(client.get(page, headers=viewer).text.split())
        assert "a job of another project" in text
        assert "secret" not in text
    assert client.get("/api/v1/jobs/secret/forks", headers=viewer).status_code == 404
    admin = hidden.cookie(hidden.person("ada", admin=True))
    assert client.get("/api/v1/jobs/ours/forks", headers=admin).json()["origin"]["job"] == "secret"


def test_what_is_rendered_once_for_many_is_rendered_for_each_kind_of_right(hidden):
    """They ask at one moment, so that the answers are shared."""
    client = hidden.client
    cast = {
        "viewer": hidden.cookie(hidden.person("vic", Role.viewer)),
        "operator": hidden.cookie(hidden.person("olga", Role.operator)),
        "admin": hidden.cookie(hidden.person("ada", admin=True)),
    }

    async def all_at_once():
        transport = httpx2.ASGITransport(client.app)
        async with httpx2.AsyncClient(transport=transport, base_url=str(client.base_url)) as http:
            asked = [(name, http.get("/jobs/ours/live", headers=cookie)) for name, cookie in 5 * [*cast.items()]]
            found = await asyncio.gather(*(answer for _, answer in asked))
            return [(name, answer) for (name, _), answer in zip(asked, found, strict=True)]

    for name, answer in hidden.ask(all_at_once):
        assert answer.status_code == 200, answer.text
        assert ("Restore…" in answer.text) is (name != "viewer"), name
        assert ("secret" in answer.text) is (name == "admin"), name
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["vary"] == "HX-Request, Accept-Encoding"
