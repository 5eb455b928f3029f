"""Each request has a name and a line in the log, and no secret is in it."""

from __future__ import annotations

import io
import json
import logging

import pytest
from starlette.testclient import TestClient

from holdfast_server.alerts import incidents
from holdfast_server.core import logs, request_id
from holdfast_server.core.request_id import HEADER
from holdfast_web import create_app
from tests.support.server_fixtures import sqlite_unless_marked as sqlite_unless_marked

JOB = "/api/v1/jobs/char-gpt"


@pytest.fixture
def written():
    """Puts what logging was set up to be back afterwards."""
    root = logging.getLogger()
    before = (root.handlers[:], root.level)
    yield io.StringIO()
    root.handlers[:] = before[0]
    root.setLevel(before[1])


@pytest.fixture
def lines(written):
    """What is logged as JSON, since the last look."""
    logs.set_up("json", "info", written)

    def lines():
        text = written.getvalue()
        written.seek(0)
        written.truncate()
        return [json.loads(line) for line in text.splitlines()]

    return lines


@pytest.mark.parametrize("name", ["0b7f3e5c-9a1d-4e62", "trace:1.2_3-ABCDEFGH", "a" * 64])
def test_a_name_that_a_proxy_gave_is_kept(client, name):
    assert client.get("/healthz", headers={HEADER: name}).headers[HEADER] == name


@pytest.mark.parametrize(
    "name", ["", "short", "a" * 65, "<script>alert(1)</script>", "two words here", "näme-näme"]
)
def test_a_name_that_could_trouble_a_log_is_replaced(client, name):
    given = client.get("/healthz", headers={HEADER: name.encode("latin-1")}).headers[HEADER]
    assert given != name
    assert len(given) == 32


@pytest.mark.parametrize("path", ["/", "/healthz", "/api/v1/nowhere", "/api/v1/jobs/nobody", "/static/nothing.js"])
def test_every_answer_is_named(client, path):
    names = {client.get(path).headers[HEADER] for _ in range(2)}
    assert len(names) == 2


def test_what_is_refused_at_the_door_is_named_too(client):
    assert HEADER in client.get("/", headers={"Host": "elsewhere.example"}).headers


def test_a_fault_of_ours_is_answered_and_logged_under_one_name_and_tells_no_secret(
    settings, clock, lines, monkeypatch
):
    def fail(*_, **__):
        raise ZeroDivisionError("Authorization: Bearer verysecretkey")

    monkeypatch.setattr(incidents, "list_alerts", fail)
    app = create_app(settings, clock=clock)
    with TestClient(app, base_url="http://127.0.0.1:7117", raise_server_exceptions=False) as client:
        reply = client.get("/api/v1/alerts", headers={HEADER: "trace-0123456789"})
    assert (reply.status_code, reply.headers[HEADER]) == (500, "trace-0123456789")
    (line,) = (line for line in lines() if line["logger"] == "holdfast_server.access")
    assert (line["status"], line["request_id"]) == (500, "trace-0123456789")


def test_an_error_is_logged_with_its_trace_and_without_its_secret(lines):
    try:
        raise ZeroDivisionError("Authorization: Bearer verysecretkey")
    except ZeroDivisionError:
        logging.getLogger("uvicorn.error").exception("it broke")
    (line,) = lines()
    assert (line["level"], line["message"]) == ("error", "it broke")
    assert "ZeroDivisionError" in line["error"]
    assert "verysecretkey" not in json.dumps(line)


def test_a_line_tells_route_status_and_duration_and_no_secret(client, lines):
    lines()
    client.get(
        "/api/v1/jobs/my-secret-job", params={"token": "hunter2hunter2"},
        headers={"Authorization": "Bearer hf_verysecretkey", HEADER: "trace-0123456789"},
    )  # fmt: skip
    (line,) = (line for line in lines() if line["logger"] == "holdfast_server.access")
    assert (line["method"], line["route"], line["status"]) == ("GET", "/api/v1/jobs/{job}", 404)
    assert (line["request_id"], line["level"]) == ("trace-0123456789", "info")
    assert line["duration_ms"] >= 0
    assert not {"hunter2", "secret", "hf_very"} & set(json.dumps(line).split('"'))
    for secret in ("hunter2", "my-secret-job", "hf_very"):
        assert secret not in json.dumps(line)


def test_what_watches_the_server_does_not_fill_the_log(client, lines):
    lines()
    for path in ("/healthz", "/readyz", "/metrics", "/static/app.css"):
        client.get(path)
    assert [line for line in lines() if line["logger"] == "holdfast_server.access"] == []


@pytest.mark.parametrize(
    "text",
    [
        "Authorization: Bearer sekret-sekret",
        "postgresql://holdfast:sekret-sekret@db/holdfast",
        "token=sekret-sekret",
        '{"password": "sekret-sekret"}',
        "HOLDFAST_TOKEN=sekret-sekret",
        "client_secret: 'sekret-sekret'",
        "a key hf_sekretsekret was shown",
    ],
)
def test_what_looks_like_a_secret_is_left_out_of_whatever_is_logged(text):
    assert "sekret" not in logs.clean(text)


def test_a_line_stays_a_line(written):
    logs.set_up("human", "info", written)
    logging.getLogger("holdfast_server").warning("job %s", "a\n2026-01-01T00:00:00.000Z error forged\x1b[31m")
    told = written.getvalue()
    assert "\x1b" not in told
    assert [line for line in told.splitlines() if not line.startswith(" ")] == [told.splitlines()[0]]


def test_outside_of_a_request_there_is_no_name():
    assert request_id.request_id() == "" or len(request_id.request_id()) >= 8
