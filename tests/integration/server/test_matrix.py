"""Everybody asks for every route, over HTTP: what is refused changes nothing, and what is not fails nowhere."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from dataclasses import replace
from urllib.parse import urlencode

import httpx2
import pytest
import uvicorn
from anyio.from_thread import start_blocking_portal

from holdfast_web import create_app
from tests.support.accounts_server import OTHER, OWN, AccountsServer
from tests.support.endpoint_table import ENDPOINTS
from tests.support.postgres import ON_SQLITE
from tests.unit.server.accounts.test_people import dump
from tests.unit.server.accounts.test_policy import CAST, STATUS, expected
from tests.unit.server.accounts.test_policy import cast as cast

pytestmark = pytest.mark.usefixtures("no_background_jobs")

OUR_PAGE = {"Sec-Fetch-Site": "same-origin"}
SIGNED_IN = {"outsider": "outsider", "viewer": "viewer", "operator": "operators", "admin": "admin",
             "server admin": "root"}  # fmt: skip
JUDGED_AGAIN = {
    ("POST", "/api/v1/ingest"),
    ("POST", "/api/v1/tokens"),
    ("POST", "/settings/keys"),
    ("POST", "/settings/password"),
    ("POST", "/login"),
}
"""Routes that judge the body too: a report of another's job, a key that may do more than its maker, a password."""

DELETES_THE_JOB = {("DELETE", "/api/v1/jobs/{job}"), ("POST", "/jobs/{job}/delete")}
"""Asked last: what is asked of a job that is gone is answered by nothing but a 404."""


class OverHttp(httpx2.Client):
    """What `AccountsServer` asks of a client, by a socket."""

    def __init__(self, app, portal, url) -> None:
        super().__init__(base_url=url, timeout=300)
        self.app, self.portal = app, portal


@pytest.fixture
def stage(settings, clock) -> Iterator[AccountsServer]:
    """A server with accounts, on a port of its own."""
    app = create_app(replace(settings, accounts=True), clock=clock)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=1))
    with socket.create_server(("127.0.0.1", 0)) as listener, start_blocking_portal() as portal:
        serving = portal.start_task_soon(server.serve, [listener])
        with OverHttp(app, portal, f"http://127.0.0.1:{listener.getsockname()[1]}") as client:
            assert client.get("/readyz").status_code == 200
            yield AccountsServer(client, clock)
        server.should_exit = True
        serving.result()


class Asking:
    """Requests that would do something, if they may."""

    def __init__(self, stage: AccountsServer, cast) -> None:
        self._stage, self._cast = stage, cast
        self._document = stage.client.app.openapi()["paths"]

    def status(self, method: str, path: str, project: str, who: str) -> int:
        address = path.replace("{job}", f"job-of-{project}").replace("{project}", project)
        address = re.sub(r"{\w+}", "1", address) + ("/app.css" if path == "/static" else "")
        headers = {**self._cast[who], **OUR_PAGE, "If-Match": '"0"'}
        body, kind = self._body(method, path, project)
        # The answer to some never ends: that it begins is enough.
        with self._stage.client.stream(
            method, address, content=body, headers={**headers, "Content-Type": kind}
        ) as reply:
            return int(reply.status_code)

    def _body(self, method: str, path: str, project: str) -> tuple[str, str]:
        operation = self._document.get(path, {}).get(method.lower(), {})
        content = operation.get("requestBody", {}).get("content", {})
        if "application/json" in content:
            example = json.dumps(content["application/json"]["example"])
            return example.replace("char-gpt", f"job-of-{project}"), "application/json"
        form = {"name": "someone", "person": "viewer", "role": "admin", "job": f"job-of-{project}"}
        return urlencode(form) if method == "POST" else "", "application/x-www-form-urlencoded"


def cells(routes, *, allowed: bool):
    for method, path in routes:
        for project in (OWN, OTHER):
            for who in CAST:
                meant = expected(ENDPOINTS.access[method, path], who, project == OWN)
                if (meant == "allow") == allowed:
                    yield method, path, project, who, meant


def refused_without_a_trace(stage: AccountsServer, cast, routes) -> int:
    """How many were refused, each as it is meant and all of them together without a change in the database."""
    asking = Asking(stage, cast)
    for who in CAST:  # from here on, that somebody was there is no news
        asking.status("GET", "/api/v1/jobs", OWN, who)
    before = dump(stage)
    asked = list(cells(routes, allowed=False))
    answered = [(*cell, asking.status(*cell[:4])) for cell in asked]
    assert [cell for cell in answered if cell[5] != STATUS[cell[4]]] == []
    assert dump(stage) == before, "something that was refused was done"
    return len(asked)


def let_in_and_answered(stage: AccountsServer, cast, routes) -> int:
    """How many were let in; none of them failed."""
    asked, wrong = 0, []
    for method, path, project, who, _ in sorted(
        cells(routes, allowed=True), key=lambda cell: cell[:2] in DELETES_THE_JOB
    ):
        if person := SIGNED_IN.get(who):  # anew each time, for some sign out
            cast[who] = stage.cookie(person)
        status = Asking(stage, cast).status(method, path, project, who)
        asked += 1
        if status >= 500 or (status in (401, 403) and (method, path) not in JUDGED_AGAIN):
            wrong.append((method, path, project, who, status))
    assert wrong == []
    return asked


@ON_SQLITE
@pytest.mark.parametrize("routes", [sorted({rule: route for route, rule in ENDPOINTS.access.items()}.values()),
                                    pytest.param(sorted(ENDPOINTS.access), marks=pytest.mark.long)],
                         ids=["one-of-each-rule", "every-route"])  # fmt: skip
def test_no_route_is_open_to_whom_it_is_not_meant_for_and_none_fails(stage: AccountsServer, cast, routes):
    refused = refused_without_a_trace(stage, cast, routes)
    allowed = let_in_and_answered(stage, cast, routes)
    assert refused + allowed == len(routes) * 2 * len(CAST)
    print(f"\n{len(routes)} routes x 2 projects x {len(CAST)} askers: {refused} refused, {allowed} answered")
