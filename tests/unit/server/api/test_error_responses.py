"""How refusals look: JSON for programs, a page for people."""

from __future__ import annotations

from dataclasses import replace

import pytest
from starlette.testclient import TestClient

from holdfast_server.api.endpoints import Router, table_of
from holdfast_server.app import create_app
from holdfast_server.core.access import PUBLIC
from holdfast_server.http.security import CONTENT_SECURITY_POLICY
from holdfast_web import web
from tests.support.server_fixtures import sqlite_unless_marked as sqlite_unless_marked

BROWSER = {"Accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
BASE_URL = "http://127.0.0.1:7117"


@pytest.fixture
def failing(settings, clock):
    """An application with a fault that nobody has thought of."""
    broken = Router()

    @broken.endpoint("GET", "/broken", access=PUBLIC)
    @broken.endpoint("GET", "/api/v1/broken", access=PUBLIC)
    def fail():
        raise ZeroDivisionError("the secret of the house")

    app = create_app(settings, web=replace(web, routers=lambda: [*web.routers(), broken]), clock=clock)
    with TestClient(app, base_url=BASE_URL, raise_server_exceptions=False) as client:
        yield client


def is_page(reply, status):
    return (
        reply.status_code == status
        and reply.headers["content-type"].startswith("text/html")
        and "<h1>" in reply.text
        and f">{status}<" in reply.text
    )


@pytest.mark.parametrize("path", ["/nowhere", "/jobs/nobody", "/jobs/nobody/live", "/static/nothing.js", "/apis"])
def test_a_browser_that_finds_nothing_gets_a_page(client, path):
    assert is_page(client.get(path, headers=BROWSER), 404)


@pytest.mark.parametrize("path", ["/nowhere", "/api/v1/nowhere", "/api/v1/jobs/nobody"])
def test_a_program_that_finds_nothing_gets_json(client, path):
    reply = client.get(path)
    assert reply.status_code == 404
    assert set(reply.json()) >= {"error", "message"}


def test_an_unknown_job_is_told_in_the_same_words_to_all(client):
    message = client.get("/api/v1/jobs/nobody").json()["message"]
    assert message == "job 'nobody' not found: no agent has reported under this name"


@pytest.mark.parametrize("path", ["/api/v1/nowhere", "/api/v1/jobs/nobody", "/api"])
def test_the_api_answers_in_json_whoever_asks(client, path):
    reply = client.get(path, headers=BROWSER)
    assert (reply.status_code, reply.headers["content-type"]) == (404, "application/json")


def test_a_path_is_written_on_the_page_as_text(client):
    assert "<script>" not in client.get("/<script>alert(1)</script>", headers=BROWSER).text


def test_a_method_that_is_not_for_a_page_is_refused_on_a_page(client):
    reply = client.delete("/jobs/char-gpt", headers=BROWSER)
    assert is_page(reply, 405)
    assert "GET" in reply.headers["allow"]


def test_a_fault_of_ours_is_a_page_for_people_and_says_nothing_of_its_insides(failing):
    reply = failing.get("/broken", headers=BROWSER)
    assert is_page(reply, 500)
    assert "secret" not in reply.text
    assert reply.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
    assert reply.headers["cache-control"] == "no-store"


@pytest.mark.parametrize("headers", [{}, BROWSER])
def test_a_fault_of_ours_is_json_for_programs(failing, headers):
    reply = failing.get("/api/v1/broken", headers=headers)
    assert (reply.status_code, reply.json()["error"]) == (500, "internal")
    assert "secret" not in reply.text
    assert reply.headers["x-content-type-options"] == "nosniff"


LARGE = b'{"key": "' + b"x" * 2**21 + b'"}'
TAKES_A_BODY = pytest.mark.parametrize(
    ("method", "path"),
    [
        ("PATCH", "/api/v1/jobs/char-gpt/desired"),
        ("POST", "/api/v1/jobs/char-gpt/restores"),
        ("POST", "/api/v1/ingest"),
        ("POST", "/jobs/char-gpt/budget"),
        ("POST", "/login"),
    ],
)


def sent_to(path):
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    return {"If-Match": '"0"', **({} if path.startswith("/api") else form)}


@TAKES_A_BODY
@pytest.mark.parametrize("in_chunks", [False, True])
def test_a_body_larger_than_the_endpoint_takes_is_refused(agent, client, method, path, in_chunks):
    agent.start()
    parts = [LARGE] * (5 if path.endswith("ingest") else 1)
    content = iter(parts) if in_chunks else b"".join(parts)
    assert client.request(method, path, content=content, headers=sent_to(path)).status_code == 413


@TAKES_A_BODY
@pytest.mark.parametrize(("declared", "status"), [(2**23 + 1, 413), (100, 400)])
def test_a_body_that_cannot_be_read_whole_is_refused_without_it(agent, client, method, path, declared, status):
    """It is too large, of which nothing is received, or its client disconnects."""
    agent.start()
    assert started(client, method, path, sent_to(path) | {"Content-Length": str(declared)})["status"] == status


def started(client, method, path, headers):
    """Return how the answer begins to a client that disconnects before it has sent the body."""
    answered = []

    async def receive():
        return {"type": "http.disconnect"}

    async def send(message):
        answered.append(message)

    named = {"Host": "127.0.0.1:7117", **headers}.items()
    scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "root_path": "",
             "query_string": b"", "scheme": "http", "http_version": "1.1", "client": ("127.0.0.1", 1),
             "headers": [(name.lower().encode(), value.encode()) for name, value in named]}  # fmt: skip
    client.portal.call(client.app, scope, receive, send)
    return answered[0]


def test_a_download_ignores_the_body_of_its_request(job, client):
    """It could not be refused any more once the answer has begun."""
    path = "/api/v1/jobs/char-gpt/export/samples.csv"
    plain = client.get(path)
    for content in (LARGE, iter([LARGE])):
        reply = client.request("GET", path, content=content)
        assert (reply.status_code, reply.text) == (200, plain.text)


def test_no_get_declares_a_body(client):
    routes = table_of(client.app).routes
    assert [route.path for route in routes if route.method == "GET" and getattr(route, "body_field", None)] == []


@pytest.mark.parametrize(
    ("method", "path"),
    [("PATCH", "/api/v1/jobs/char-gpt/desired"), ("POST", "/api/v1/jobs/char-gpt/restores")],
)
def test_an_edit_nested_without_end_is_refused(agent, client, method, path):
    agent.start()
    deep = b'{"budget":' + b"[" * 20_000 + b"]" * 20_000 + b"}"
    reply = client.request(method, path, content=deep, headers={"If-Match": '"0"'})
    assert (reply.status_code, reply.json()["error"]) == (422, "invalid_setting")
