from __future__ import annotations

import re

import pytest
from starlette.testclient import TestClient

from holdfast_server import documentation
from holdfast_server.app import create_app
from holdfast_server.security import (
    CONTENT_SECURITY_POLICY,
    SESSION_SECONDS,
    check_token,
    session_cookie,
    valid_session,
)
from holdfast_server.settings import ServerSettings
from holdfast_web.routes import router as pages

TOKEN = "a-shared-secret-of-some-length"
JOBS = "/api/v1/jobs"
BASE_URL = "http://127.0.0.1:7117"


@pytest.fixture(scope="module")
def anyone(tmp_path_factory):
    """A server that nothing is stored in, for what is refused or the same whatever is stored."""
    settings = ServerSettings(database=str(tmp_path_factory.mktemp("open") / "holdfast.db"))
    with TestClient(create_app(settings), base_url=BASE_URL) as client:
        yield client


@pytest.fixture(scope="module")
def locked(tmp_path_factory):
    settings = ServerSettings(
        database=str(tmp_path_factory.mktemp("locked") / "holdfast.db"),
        token=TOKEN,
        allowed_hosts=("cluster.example",),
    )
    with TestClient(create_app(settings), base_url=BASE_URL, follow_redirects=False) as client:
        yield client


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:7117", "127.0.0.1.evil.example", "", "localhost.evil"]
)
@pytest.mark.parametrize("path", ["/", JOBS, "/healthz", "/static/app.css", "/docs"])
def test_a_name_that_is_not_ours_is_refused_everywhere(anyone, host, path):
    reply = anyone.get(path, headers={"Host": host})
    assert (reply.status_code, reply.json()["error"]) == (421, "unknown_host")


@pytest.mark.parametrize("host", ["127.0.0.1:7117", "localhost:7117", "LOCALHOST", "[::1]:7117", "10.0.0.8:80"])
def test_localhost_and_addresses_are_answered(anyone, host):
    assert anyone.get(JOBS, headers={"Host": host}).status_code == 200


def test_a_name_that_was_allowed_is_answered(locked):
    headers = {"Authorization": f"Bearer {TOKEN}"}
    assert locked.get(JOBS, headers=headers | {"Host": "cluster.example"}).status_code == 200


def test_an_agent_with_the_token_may_use_any_name(locked):
    headers = {"Host": "holdfast-server:7117"}
    assert locked.get(JOBS, headers=headers).status_code == 421
    assert locked.get(JOBS, headers=headers | {"Authorization": f"Bearer {TOKEN}"}).status_code == 200


UNSAFE = [("POST", "/api/v1/ingest"), ("PATCH", f"{JOBS}/j/desired"), ("POST", f"{JOBS}/j/restores"),
          ("POST", f"{JOBS}/j/restores/x/cancel"), ("POST", "/jobs/j/budget"), ("POST", "/login"),
          ("PUT", JOBS), ("DELETE", JOBS)]  # fmt: skip


@pytest.mark.parametrize(("method", "path"), UNSAFE)
@pytest.mark.parametrize(
    "headers",
    [
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "cross-site", "Origin": BASE_URL},
        {"Origin": "https://evil.example"},
        {"Origin": "http://127.0.0.1:8888"},
        {"Origin": "null"},
        {"Origin": "http://["},
        {"Origin": ""},
    ],
)
def test_what_another_site_makes_a_browser_send_is_refused(anyone, method, path, headers):
    reply = anyone.request(method, path, headers=headers)
    assert (reply.status_code, reply.json()["error"]) == (403, "cross_origin")


@pytest.mark.parametrize(
    "headers", [{"Sec-Fetch-Site": "same-origin"}, {"Sec-Fetch-Site": "none"}, {"Origin": BASE_URL}, {}]
)
def test_our_own_pages_and_programs_may_write(client, agent, headers):
    agent.start()
    headers = headers | {"If-Match": '"0"'}
    assert client.patch(f"{JOBS}/char-gpt/desired", json={"budget": 0.02}, headers=headers).status_code == 200


def test_reading_needs_no_origin(anyone):
    assert anyone.get(JOBS, headers={"Sec-Fetch-Site": "cross-site"}).status_code == 200


OPEN = {"/healthz", "/readyz", "/login", "/static"}


def routes_of(router, prefix=""):
    """(method, path) of everything that a router answers, in the routers that it includes too."""
    for route in router.routes:
        if hasattr(route, "original_router"):
            yield from routes_of(route.original_router, prefix + route.include_context.prefix)
        else:
            for method in getattr(route, "methods", None) or ["GET"]:
                yield method, prefix + route.path


@pytest.fixture(scope="module")
def walked(locked):
    """Every route, with the parameters of its path filled in."""
    found = sorted(set(routes_of(locked.app)))
    paths = {path for _, path in found}
    assert paths >= set(locked.app.openapi()["paths"])
    assert paths >= {route.path for router in (pages, documentation.router) for route in router.routes}
    assert paths >= {"/openapi.json", "/docs/style.css", "/fleet/live", "/fleet/stream", "/jobs/{job}/budget"}
    return [(method, re.sub(r"{[^}]*}", "x", path)) for method, path in found]


def test_the_token_is_asked_for_on_every_route_that_is_not_open(locked, walked):
    for path in sorted({path for _, path in walked} - OPEN):
        for method in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"):
            assert locked.request(method, path).status_code == 401, (method, path)
        page = locked.get(path, headers={"Accept": "text/html"})
        assert (page.status_code, page.headers["location"].split("?")[0]) == (303, "/login"), path
        part = locked.get(path, headers={"HX-Request": "true"})
        assert (part.status_code, part.headers["hx-redirect"]) == (401, "/login"), path


def test_the_open_routes_change_nothing_without_the_token(walked, locked):
    unsafe = [(method, path) for method, path in walked if path in OPEN and method not in ("GET", "HEAD")]
    assert unsafe == [("POST", "/login")]
    assert locked.post("/login", data={"token": "wrong"}).status_code == 401


def test_no_route_is_written_to_from_another_site(locked, walked):
    token = {"Authorization": f"Bearer {TOKEN}"}
    unsafe = [(method, path) for method, path in walked if method not in ("GET", "HEAD")]
    assert {method for method, _ in unsafe} == {"POST", "PATCH"}
    for method, path in unsafe:
        for headers in ({"Sec-Fetch-Site": "cross-site"}, {"Origin": "https://evil.example"}):
            reply = locked.request(method, path, headers=headers | token)
            assert (reply.status_code, reply.json()["error"]) == (403, "cross_origin"), (method, path)


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/static/app.css", "/login"])
def test_open_paths_are_open(locked, path):
    assert locked.get(path).status_code == 200


@pytest.mark.parametrize("path", ["/staticx", "/loginx", "/healthz/x", "/static/../api/v1/jobs", "/readyzz"])
def test_what_only_looks_like_an_open_path_is_not(locked, path):
    assert locked.get(path).status_code in (401, 404)
    assert "jobs" not in locked.get(path).text


@pytest.mark.parametrize(
    "header", ["Bearer wrong", f"Basic {TOKEN}", TOKEN, "Bearer", f"Bearer {TOKEN}x", "Bearer é"]
)
def test_another_token_is_refused(locked, header):
    reply = locked.get(JOBS, headers={"Authorization": header.encode()})
    assert (reply.status_code, reply.headers["www-authenticate"]) == (401, "Bearer")
    assert reply.json()["error"] == "wrong_token"
    assert reply.json()["message"] != locked.get(JOBS).json()["message"]


def test_the_token_opens(locked):
    assert locked.get(JOBS, headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200


def test_a_browser_is_sent_to_sign_in_and_comes_back(locked):
    reply = locked.get("/jobs/x?points=3", headers={"Accept": "text/html"})
    assert (reply.status_code, reply.headers["location"]) == (303, "/login?next=/jobs/x%3Fpoints%3D3")
    assert locked.get("/jobs/x", headers={"HX-Request": "true"}).headers["hx-redirect"] == "/login"


def test_a_session_opens_until_it_expires_or_the_token_changes(locked):
    settings = locked.app.state.settings
    cookie = session_cookie(settings)
    assert (cookie["httponly"], cookie["samesite"], cookie["max_age"]) == (True, "lax", SESSION_SECONDS)
    assert locked.get(JOBS, headers={"Cookie": f"{cookie['key']}={cookie['value']}"}).status_code == 200
    value = session_cookie(settings, now=1000.0)["value"]
    assert valid_session(settings, value, now=1000.0 + SESSION_SECONDS - 1)
    assert not valid_session(settings, value, now=1000.0 + SESSION_SECONDS + 1)
    assert not valid_session(ServerSettings(database="x", token="another"), value, now=1000.0)


@pytest.mark.parametrize("value", ["", ".", "99999999999.", "99999999999.00", "x.y", "९९.x", "9" * 50 + ".x"])
def test_a_session_cannot_be_made_up(locked, value):
    assert not valid_session(locked.app.state.settings, value, now=0.0)


@pytest.mark.parametrize("typed", [TOKEN, f" {TOKEN}", f"{TOKEN}\n"])
@pytest.mark.parametrize("set_as", [TOKEN, f"{TOKEN}\n", f"  {TOKEN} "])
def test_blanks_around_the_secret_do_not_count(set_as, typed):
    assert check_token(ServerSettings(database="x", token=set_as), typed)


@pytest.mark.parametrize("set_as", ["", " ", "\n"])
def test_blanks_are_no_secret(set_as):
    assert ServerSettings(database="x", token=set_as).token is None


def test_without_a_secret_no_token_is_right():
    assert not check_token(ServerSettings(database="x"), "")


@pytest.mark.parametrize("path", ["/", JOBS, "/docs", "/nowhere", "/static/app.css", "/healthz"])
def test_every_answer_tells_the_browser_what_to_refuse(anyone, path):
    headers = anyone.get(path).headers
    assert headers["content-security-policy"] == CONTENT_SECURITY_POLICY
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "same-origin"
    assert headers["cross-origin-opener-policy"] == "same-origin"


def test_what_jobs_do_is_not_kept_by_caches(anyone):
    assert anyone.get(JOBS).headers["cache-control"] == "no-store"


def test_the_secret_is_not_in_what_the_settings_print():
    assert TOKEN not in repr(ServerSettings(database="x", token=TOKEN))
