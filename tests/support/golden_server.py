"""What the golden database holds, and the requests that show it."""

from __future__ import annotations

from typing import Any

from starlette.testclient import TestClient

from holdfast.protocol.ids import checkpoint_id
from holdfast.protocol.wire import ConfigurationReport, Notice, OutputReport, VerificationReport
from holdfast_server.alerts import evaluation
from holdfast_server.core.principal import Role
from tests.support.accounts_server import AccountsServer
from tests.support.clock import FakeClock
from tests.support.fake_agent import FakeAgent, over_client

JOB = "/api/v1/jobs/char-gpt"
PINNED = checkpoint_id(150, 1)
PROJECT = "/api/v1/projects/default"
PATHS = (
    "/api/v1/jobs", "/api/v1/alerts", "/api/v1/people", "/api/v1/tokens", "/api/v1/audit",
    f"{PROJECT}/alert-rules", f"{PROJECT}/alert-channels", f"{PROJECT}/retention",
    JOB, f"{JOB}/checkpoints", f"{JOB}/checkpoints/{PINNED}/verification", f"{JOB}/restores",
    f"{JOB}/timeline?from=60&to=90", f"{JOB}/attempts", f"{JOB}/attempts/1/configuration",
    f"{JOB}/attempts/1/output", f"{JOB}/notices", f"{JOB}/annotations", f"{JOB}/edits", f"{JOB}/desired",
    f"{JOB}/goodput", f"{JOB}/forks", f"{JOB}/alerts",
)  # fmt: skip
"""Requests whose responses are kept with the database."""


def fill(client: TestClient, clock: FakeClock) -> None:
    """Store a little of everything through the HTTP API, and people, projects and keys as their pages do."""

    def call(method: str, path: str, **more: Any) -> Any:
        reply = client.request(method, path, **more)
        assert reply.status_code < 300, f"{method} {path}: {reply.status_code} {reply.text}"
        return reply.json() if reply.content else None

    agent = FakeAgent(over_client(client), started_at=clock())

    def report() -> None:
        clock.now = agent.at
        agent.send()

    agent.start()
    agent.events.append(
        ConfigurationReport(at=agent.at, section="configuration", values={"lr": "0.001", "layers": "4"})
    )
    agent.events.append(OutputReport(at=agent.at, first=0, lines=["epoch 1", "epoch 2"]))
    agent.train(120, nan_at=range(70, 72))
    report()
    agent.crash(lost=10)
    agent.train(120)
    report()
    for changes in (
        {"budget": 0.02},
        {"every": 25},
        {"paused": True},
        {"paused": False, "checkpoint_request": True},
    ):
        version = call("GET", f"{JOB}/desired")["version"]
        call("PATCH", f"{JOB}/desired", json=changes, headers={"If-Match": f'"{version}"'})
        agent.obey(agent.desired())
        report()
    agent.train(60)
    report()
    call("PATCH", f"{JOB}/checkpoints/{PINNED}", json={"pinned": True, "label": "before the schedule"})
    call("POST", f"{JOB}/restores", json={"checkpoint": PINNED, "key": "golden"})
    agent.obey(agent.desired())
    agent.train(40, nan_at=range(165, 200))
    agent.events.append(
        Notice(at=agent.at, iteration=180, lineage=2, level="warning", code="slow", message="the store is slow")
    )
    report()
    call("POST", f"{JOB}/checkpoints/{PINNED}/verification", json={})
    request = agent.desired().verify[0]
    agent.events.append(
        VerificationReport(
            at=agent.at, request=request.id, checkpoint=PINNED, verdict="sound", host="node-3", read_bytes=100,
            total_bytes=100, seconds=0.5,
        )
    )  # fmt: skip
    report()
    call("POST", f"{JOB}/annotations", json={"text": "learning rate halved", "iteration": 150})
    call("PUT", f"{PROJECT}/alert-rules/loss_nan", json={"severity": "critical", "enabled": True})
    call("PATCH", f"{PROJECT}/retention", json={"samples_seconds": 90 * 86400.0})
    server = AccountsServer(client, clock)
    for _ in range(2):
        clock.now += 300
        evaluation.evaluate(server.db, clock())
    alert = call("GET", "/api/v1/alerts")["alerts"][0]
    call("POST", f"{JOB}/alerts/{alert['id']}/acknowledge")
    _add_people(server)


def _add_people(server: AccountsServer) -> None:
    server.project("vision")
    server.person_with_password("ada", admin=True)
    server.person_with_password("bob", Role.viewer)
    server.key("report", project="vision", name="agents of vision")
    server.cookie("ada")
    server.sign_in("bob", "wrong")


def responses(client: TestClient) -> dict[str, Any]:
    """Return the responses to PATHS."""
    found = {}
    for path in PATHS:
        reply = client.get(path)
        assert reply.status_code == 200, f"{path}: {reply.status_code} {reply.text}"
        found[path] = reply.json()
    return found
