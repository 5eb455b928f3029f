"""Captured requests of an agent and an operator, replayed; captured responses, parsed by the clients of today.

A failure means that agents and servers of different releases no longer understand each other. Before the first
release, `python -m tools.golden conversation` makes the capture anew.
"""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from starlette.testclient import TestClient

from holdfast.client import Client
from holdfast.protocol.wire import Ack, Batch
from holdfast.server_link.http_client import AgentClient, HttpClient, HttpResponse
from holdfast_server.core.settings import ServerSettings
from holdfast_web import create_app
from tests.support.accounts_server import BASE_URL

GOLDEN = Path(__file__).parents[2] / "golden"
EXCHANGES: list[dict[str, Any]] = json.loads((GOLDEN / "conversation.json").read_text())
INGEST = "/api/v1/ingest"


def body_of(exchange: dict[str, Any], name: str = "body") -> bytes | None:
    return None if exchange[name] is None else base64.b64decode(exchange[name])


def test_a_server_of_today_takes_every_captured_request(tmp_path: Path) -> None:
    settings = ServerSettings(database=str(tmp_path / "holdfast.db"))
    with TestClient(create_app(settings), base_url=BASE_URL) as client:
        names: dict[str, str] = {}
        for number, exchange in enumerate(EXCHANGES):
            path = re.sub(r"[?&]wait=[\d.]+", "", exchange["path"])
            for old, new in names.items():
                path = path.replace(old, new)
            reply = client.request(
                exchange["method"], path, content=body_of(exchange), headers=exchange["headers"]
            )
            # without its wait, a long poll may answer that nothing is newer
            assert reply.status_code in {exchange["status"], 204 if "after=" in path else exchange["status"]}, (
                f"request {number}, {exchange['method']} {path}: {reply.status_code} {reply.text}"
            )
            if path == INGEST:
                then = msgspec.msgpack.decode(body_of(exchange, "response") or b"", type=Ack)
                assert msgspec.msgpack.decode(reply.content, type=Ack).acked == then.acked
            if path.endswith("/restores") and exchange["method"] == "POST":
                names[json.loads(body_of(exchange, "response") or b"")["id"]] = reply.json()["id"]
        (order,) = client.get("/api/v1/jobs/plain/restores").json()["restores"]
        assert client.get("/api/v1/jobs/plain").json()["iteration"] > 0
        assert client.get("/api/v1/jobs/plain/checkpoints").json()["checkpoints"]
        assert order["key"] == "golden" if "key" in order else order["state"]


def test_every_captured_event_is_known() -> None:
    batches = [
        msgspec.msgpack.decode(body_of(each) or b"", type=Batch) for each in EXCHANGES if each["path"] == INGEST
    ]
    events = [event for batch in batches for event in batch.events]
    assert {type(event).__name__ for event in events} >= {"AttemptStarted", "Checkpoint", "OrderStateChange"}


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answer each request with the newest captured response to it."""
    answers = {(each["client"], each["method"], each["path"]): each for each in EXCHANGES}

    def exchange(self: HttpClient, method: str, path: str, *_: Any, **__: Any) -> HttpResponse:
        sender = "AgentClient" if isinstance(self, AgentClient) else "Client"
        found = answers[sender, method, path]
        return HttpResponse(found["status"], body_of(found, "response") or b"", 0.0)

    monkeypatch.setattr(HttpClient, "exchange", exchange)


def test_a_client_of_today_parses_every_captured_response(captured: None) -> None:
    with Client(BASE_URL) as client:
        assert [job.job for job in client.jobs()] == ["plain"]
        questions = (
            client.job, client.checkpoints, client.orders, client.timeline, client.attempts, client.notices,
            client.edits, client.annotations, client.desired, client.goodput, client.forks,
        )  # fmt: skip
        found = {question.__name__: question("plain") for question in questions}
        assert found["job"].iteration > 0
        assert any(row.pinned and row.label == "golden" for row in found["checkpoints"])
        assert [order.state for order in found["orders"]] == ["restored"]
        assert found["desired"].budget == 0.02
        assert [note.text for note in found["annotations"]] == ["learning rate halved"]
        assert client.configuration("plain", 1).attempt == 1


def test_an_agent_of_today_understands_the_captured_orders(captured: None) -> None:
    agent = AgentClient(BASE_URL, None)
    batches = [each for each in EXCHANGES if each["path"] == INGEST]
    newest = msgspec.msgpack.decode(body_of(batches[-1]) or b"", type=Batch)
    assert agent.ingest(b"", newest.sequence).acked == newest.sequence
    polls = [each["path"] for each in EXCHANGES if each["client"] == "AgentClient" and each["method"] == "GET"]
    desired = []
    for path in polls:
        query = re.search(r"after=(\d+)&wait=([\d.]+)(?:&alert_pins=([^&]*))?", path)
        options = {"after": int(query[1]), "wait_seconds": float(query[2])} if query else {}
        if query and query[3] is not None:
            options["alert_pins"] = query[3].split(",") if query[3] else []
        desired.append(agent.desired("plain", **options))
    assert any(each is not None and each.budget == 0.02 for each in desired)
    assert any(each is not None and each.restore is not None for each in desired)


def test_a_client_of_today_ignores_what_a_later_server_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every object of every response has one more field."""

    def with_more(value: Any) -> Any:
        if isinstance(value, dict):
            return {**{name: with_more(each) for name, each in value.items()}, "of_a_later_release": "1"}
        return [with_more(each) for each in value] if isinstance(value, list) else value

    answers = {(each["method"], each["path"]): body_of(each, "response") or b"" for each in EXCHANGES}

    def exchange(self: HttpClient, method: str, path: str, *_: Any, **__: Any) -> HttpResponse:
        return HttpResponse(200, msgspec.json.encode(with_more(json.loads(answers[method, path]))), 0.0)

    monkeypatch.setattr(HttpClient, "exchange", exchange)
    with Client(BASE_URL) as client:
        assert client.job("plain").job == "plain"
        assert client.checkpoints("plain")
        assert [order.state for order in client.orders("plain")] == ["restored"]
        assert client.desired("plain").budget == 0.02
    assert AgentClient(BASE_URL, None).desired("plain") is not None
