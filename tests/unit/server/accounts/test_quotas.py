"""How many jobs a project may have, and how many streams a person: beyond that, the refusal says what to do."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from dataclasses import replace

import pytest
import uvicorn
from anyio.from_thread import start_blocking_portal
from starlette.testclient import TestClient

from holdfast_server.core.principal import Role
from holdfast_server.http import dependencies
from holdfast_web import create_app
from tests.integration.server.test_matrix import OverHttp
from tests.support.accounts_server import OTHER, OURS, OWN, AccountsServer

JOBS = "/api/v1/jobs"


def report(client, job, sequence=0, headers=None):
    batch = {"job": job, "uid": f"of {job}", "attempt": 1, "rank": 0, "sequence": sequence, "sent_at": 1.79e9,
             "iteration": 0, "lineage": 1}  # fmt: skip
    return client.post("/api/v1/ingest", json=batch, headers=headers or {})


@pytest.fixture
def few(settings, clock):
    with TestClient(create_app(replace(settings, max_jobs=3), clock=clock)) as client:
        client.base_url = "http://127.0.0.1:7117"
        yield client


def test_a_project_takes_no_more_jobs_than_it_may_have(few):
    assert [report(few, f"job-{number}").status_code for number in range(3)] == [200] * 3
    refused = report(few, "job-3")
    assert (refused.status_code, refused.json()["error"], refused.headers["retry-after"]) == (
        429, "too_many_jobs", "60",
    )  # fmt: skip
    assert "holdfast delete JOB" in refused.json()["message"]
    assert "HOLDFAST_MAX_JOBS" in refused.json()["message"]
    assert len(few.get(JOBS).json()["jobs"]) == 3
    assert report(few, "job-0", sequence=1).status_code == 200  # those that are there go on


def test_a_place_that_a_deleted_job_leaves_is_free(few, clock):
    for number in range(3):
        report(few, f"job-{number}")
    clock.now += 60
    assert few.delete(f"{JOBS}/job-1").status_code == 204
    assert report(few, "job-3").status_code == 200


def test_each_project_has_its_own_limit(settings, clock):
    app = create_app(replace(settings, accounts=True, max_jobs=1), clock=clock)
    with TestClient(app, base_url="http://127.0.0.1:7117") as client:
        stage = AccountsServer(client, clock)
        stage.project(OWN)
        stage.project(OTHER)
        ours, theirs = stage.bearer("report"), stage.bearer("report", project=OTHER)
        assert report(client, "a", headers=ours).status_code == 200
        assert report(client, "b", headers=ours).status_code == 429
        assert report(client, "b", headers=theirs).status_code == 200


# ---- streams: over HTTP, since they never end by themselves ----------------------------------


@pytest.fixture
def served(settings, clock):
    """A server with accounts on a port of its own, with a job."""
    app = create_app(replace(settings, accounts=True), clock=clock)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=1))
    with socket.create_server(("127.0.0.1", 0)) as listener, start_blocking_portal() as portal:
        serving = portal.start_task_soon(server.serve, [listener])
        with OverHttp(app, portal, f"http://127.0.0.1:{listener.getsockname()[1]}") as client:
            assert client.get("/readyz").status_code == 200
            stage = AccountsServer(client, clock)
            stage.project(OWN, "one")
            yield stage
        server.should_exit = True
        serving.result()


@pytest.mark.parametrize("path", [f"{JOBS}/one/stream", "/fleet/stream"])
def test_a_person_listens_to_so_many_streams_and_others_to_theirs(served: AccountsServer, monkeypatch, path):
    monkeypatch.setattr(dependencies, "MAX_STREAMS", 3)
    ada = served.cookie(served.person("ada", Role.viewer)) | OURS
    bob = served.cookie(served.person("bob", Role.viewer)) | OURS
    client = served.client
    with ExitStack() as listening:

        def listen(headers):
            return listening.enter_context(client.stream("GET", path, headers=headers))

        assert [listen(ada).status_code for _ in range(3)] == [200] * 3
        refused = client.get(path, headers=ada)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "5")
        assert "ou have 3 open streams already" in refused.text
        assert listen(bob).status_code == 200
    with client.stream("GET", path, headers=bob) as again:  # those that ended have given their places back
        assert again.status_code == 200
    while sum(client.app.state.services.streams.values()):
        assert client.get("/readyz").status_code == 200
    with client.stream("GET", path, headers=ada) as again:
        assert again.status_code == 200


def test_the_keys_of_a_person_share_their_places(served: AccountsServer, monkeypatch):
    monkeypatch.setattr(dependencies, "MAX_STREAMS", 2)
    keys = [served.bearer("read") for _ in range(3)]
    with ExitStack() as listening:
        for key in keys[:2]:
            reply = listening.enter_context(served.client.stream("GET", f"{JOBS}/one/stream", headers=key))
            assert reply.status_code == 200
        refused = served.client.get(f"{JOBS}/one/stream", headers=keys[2])
        assert (refused.status_code, refused.json()["error"]) == (429, "too_many_streams")


@pytest.mark.processes
def test_without_accounts_streams_are_not_counted(serve, monkeypatch):
    server = serve()
    with server.client() as client, ExitStack() as listening:
        for _ in range(dependencies.MAX_STREAMS + 2):
            assert listening.enter_context(client.stream("GET", "/fleet/stream")).status_code == 200


def test_the_stream_of_a_deleted_job_ends(served: AccountsServer):
    key = served.bearer("admin")
    with served.client.stream("GET", f"{JOBS}/one/stream", headers=key) as listening:
        lines = listening.iter_lines()
        assert next(lines) == "event: tick"
        assert served.client.delete(f"{JOBS}/one", headers=key).status_code == 204
        # what was reported before may come late; then the stream ends
        assert {line for line in lines if line.startswith("event")} <= {"event: tick"}
