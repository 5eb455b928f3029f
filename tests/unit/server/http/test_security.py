from __future__ import annotations

import logging
import re
from dataclasses import replace
from urllib.parse import parse_qs, urlsplit

import anyio
import pytest
from fastapi import FastAPI, Request
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient

from holdfast_server.accounts import people, sign_ins, tokens
from holdfast_server.accounts.auth_backends import SharedSecretAuth
from holdfast_server.api.endpoints import table_of
from holdfast_server.core.principal import OPERATOR
from holdfast_server.core.settings import ServerSettings
from holdfast_server.http.auth_middleware import COOKIE
from holdfast_server.http.security import CONTENT_SECURITY_POLICY, BodyMiddleware
from holdfast_web import create_app
from holdfast_web.job.routes import router as pages
from tests.support.accounts_server import OURS, PASSWORD, AccountsServer, browser_at
from tests.support.postgres import ON_BOTH
from tests.support.server_fixtures import sqlite_unless_marked as sqlite_unless_marked
from tests.unit.server.accounts.test_people import dump

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
    if (path, host) == ("/healthz", ""):
        pytest.skip("a health check over HTTP/1.0 may leave out the host name")
    reply = anyone.get(path, headers={"Host": host})
    assert (reply.status_code, reply.json()["error"]) == (421, "unknown_host")


@pytest.mark.parametrize(
    "host", ["[::1]evil.com", "[::1].evil.com:7117", "[::1", "::1", "[127.0.0.1]", "127.0.0.1:7117:80",
             "127.0.0.1:x", "localhost@evil.com", "localhost evil.com"],
)  # fmt: skip
def test_what_is_no_name_and_port_is_refused(anyone, host):
    assert anyone.get(JOBS, headers={"Host": host}).status_code == 421


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
@pytest.mark.parametrize("headers", [{"Sec-Fetch-Site": "cross-site"}, {"Origin": "null"}, {"Origin": "http://["}])
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


OPEN = {"/healthz", "/readyz", "/login", "/setup", "/reset", "/login/provider", "/login/provider/back", "/static"}


@pytest.fixture(scope="module")
def walked(locked):
    """Every route, with the parameters of its path filled in."""
    found = sorted(table_of(locked.app).access)
    paths = {path for _, path in found}
    assert paths >= set(locked.app.openapi()["paths"])
    assert paths >= {endpoint.path for endpoint in pages.endpoints}
    assert paths >= {"/openapi.json", "/docs/style.css", "/fleet/live", "/fleet/stream", "/jobs/{job}/budget"}
    return [(method, re.sub(r"{[^}]*}", "x", path)) for method, path in found]


def test_the_token_is_asked_for_on_every_route_that_is_not_open(locked, walked):
    for path in sorted({path for _, path in walked} - OPEN):
        for method in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"):
            assert locked.request(method, path).status_code == 401, (method, path)
        page = locked.get(path, headers={"Accept": "text/html"})
        assert (page.status_code, page.headers["location"].split("?")[0]) == (303, "/login"), path
        part = locked.get(path, headers={"HX-Request": "true"})
        assert (part.status_code, part.headers.get("hx-redirect")) == (401, None), path


def test_the_open_routes_change_nothing_without_the_token(walked, locked):
    unsafe = {path for method, path in walked if path in OPEN and method not in ("GET", "HEAD")}
    assert unsafe == {"/login", "/setup", "/reset"}
    assert locked.post("/login", data={"token": "wrong"}).status_code == 401
    for path in ("/setup", "/reset"):
        assert locked.post(path, data={"code": "x", "name": "x", "password": PASSWORD}).status_code == 422


CROSS_ORIGIN = [
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
    {"Sec-Fetch-Site": "cross-site", "Origin": BASE_URL},
    {"Sec-Fetch-Site": ""},
    {"Origin": "https://evil.example"},
    {"Origin": "http://127.0.0.1:8888"},
    {"Origin": "null"},
    {"Origin": ""},
    {"Origin": "https://evil.example", "X-HTTP-Method-Override": "GET"},
    {"Sec-Fetch-Site": "cross-site", "Content-Type": "text/plain"},
]


def test_no_route_is_written_to_from_another_site(locked, walked):
    token = {"Authorization": f"Bearer {TOKEN}"}
    unsafe = [(method, path) for method, path in walked if method not in ("GET", "HEAD")]
    assert {method for method, _ in unsafe} >= {"POST", "PATCH"}
    for method, path in unsafe:
        for headers in CROSS_ORIGIN:
            reply = locked.request(method, path, headers=headers | token)
            assert (reply.status_code, reply.json()["error"]) == (403, "cross_origin"), (method, path, headers)


def test_a_browser_that_keeps_quiet_of_where_it_is_writes_nothing(locked, walked):
    """It brings a session, and neither header: no browser of today does that to a page of ours."""
    cookie = browser_of(browser_at(locked, "10.0.0.1").post("/login", data={"token": TOKEN}))
    assert cookie["Cookie"].startswith(f"{COOKIE}=")
    for method, path in walked:
        if method not in ("GET", "HEAD") and path != "/logout":  # which would end the session
            reply = locked.request(method, path, headers=cookie)
            assert (reply.status_code, reply.json()["error"]) == (403, "cross_origin"), (method, path)
            ours = locked.request(method, path, headers=cookie | {"Origin": BASE_URL})
            assert ours.status_code != 403, (method, path)


def test_behind_a_proxy_the_public_address_is_ours_too(tmp_path):
    settings = ServerSettings(database=str(tmp_path / "x.db"), address="https://holdfast.example")
    with TestClient(create_app(settings), base_url=BASE_URL) as client:
        ours = client.post("/login", headers={"Origin": "https://holdfast.example"})
        assert ours.status_code != 403
        assert client.post("/login", headers={"Origin": "https://evil.example"}).status_code == 403
        assert client.get("/login", headers={"Host": "holdfast.example"}).status_code == 200


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


@pytest.mark.parametrize(
    ("referer", "address"),
    [
        ("http://127.0.0.1:7117/jobs/x?points=3", "/jobs/x?points=3"),
        ("http://127.0.0.1:7117/fleet/confirm", "/"),
        ("http://127.0.0.1:7117/projects/p/alert-rules/loss_spike", "/projects/p/alert-rules"),
        ("http://[", "/"),
        ("", "/"),
    ],
)
def test_a_form_without_a_sign_in_leads_back_to_its_page(locked, referer, address):
    browser = browser_at(locked, "10.0.0.8")
    headers = {"Accept": "text/html", "Referer": referer, **OURS}
    reply = browser.post("/jobs/x/budget", data={"budget": "2"}, headers=headers)
    assert reply.status_code == 303
    then = parse_qs(urlsplit(reply.headers["location"]).query)["next"][0]
    signed_in = browser.post("/login", data={"token": TOKEN, "next": then})
    assert (signed_in.status_code, signed_in.headers["location"]) == (303, address)


def test_the_secret_is_not_guessed_at_the_page(tmp_path):
    settings = ServerSettings(database=str(tmp_path / "holdfast.db"), token=TOKEN)
    with TestClient(create_app(settings, clock=lambda: 1.79e9), base_url=BASE_URL) as client:
        guesses = [client.post("/login", data={"token": f"guess-{number}"}).status_code for number in range(42)]
        assert guesses == [401] * 40 + [429] * 2
        assert "wait 5 s" in client.post("/login", data={"token": TOKEN}).text


def browser_of(reply):
    return {"Cookie": reply.headers["set-cookie"].partition(";")[0]}


def test_a_session_opens_until_it_expires_or_the_token_changes(tmp_path, clock):
    settings = ServerSettings(database=str(tmp_path / "holdfast.db"), token=TOKEN)
    with TestClient(create_app(settings, clock=clock), base_url=BASE_URL, follow_redirects=False) as client:
        signed_in = client.post("/login", data={"token": f" {TOKEN} ", "next": "/docs"}, headers=OURS)
        assert (signed_in.status_code, signed_in.headers["location"]) == (303, "/docs")
        assert {"HttpOnly", "SameSite=lax", "Path=/"} <= set(signed_in.headers["set-cookie"].split("; "))
        browser, began_at = browser_of(signed_in), clock.now
        clock.now = began_at + sign_ins.LASTS_SECONDS - 1
        assert client.get(JOBS, headers=browser).status_code == 200
        clock.now = began_at + sign_ins.LASTS_SECONDS + 1
        assert client.get(JOBS, headers=browser).status_code == 401
    clock.now = began_at
    with TestClient(create_app(settings, clock=clock), base_url=BASE_URL) as client:
        assert client.get(JOBS, headers=browser).status_code == 200, "a restart ends no session"
    other = replace(settings, token="another secret of some length")
    with TestClient(create_app(other, clock=clock), base_url=BASE_URL) as client:
        assert client.get(JOBS, headers=browser).status_code == 401


def test_signing_out_ends_the_session_of_that_browser_and_of_no_other(locked):
    visitor = browser_at(locked, "10.0.0.1")
    here, there = (browser_of(visitor.post("/login", data={"token": TOKEN})) for _ in range(2))
    assert here != there
    out = locked.post("/logout", headers=here | OURS)
    assert (out.status_code, out.headers["location"]) == (303, "/login")
    assert [locked.get(JOBS, headers=browser).status_code for browser in (here, there)] == [401, 200]


@pytest.mark.parametrize("value", ["", ".", "99999999999.00", "x.y", "null", "' OR 1=1 --"])
def test_a_session_cannot_be_made_up(locked, value):
    assert locked.get(JOBS, headers={"Cookie": f"{COOKIE}={value}"}).status_code == 401


def bearer(token):
    return {"Authorization": f"Bearer {token}"}


@pytest.fixture
def guessed(tmp_path, clock):
    """Makes clients at any address, of a server with a shared secret."""
    settings = ServerSettings(database=str(tmp_path / "holdfast.db"), token=TOKEN)
    with TestClient(create_app(settings, clock=clock), base_url=BASE_URL) as client:
        yield lambda address: browser_at(client, address)


def test_the_secret_is_not_guessed_by_programs(guessed, clock):
    client = guessed("10.0.0.9")
    told = [client.get(JOBS, headers=bearer(f"guess-{number}")) for number in range(42)]
    assert [reply.status_code for reply in told] == [401] * 40 + [429] * 2
    assert told[-1].headers["retry-after"] == "5"
    refused = client.get(JOBS, headers=bearer(TOKEN))
    assert refused.status_code == 429, "or the right one would be told from the wrong ones"
    assert guessed("10.0.0.10").get(JOBS, headers=bearer(TOKEN)).status_code == 200
    clock.now += 5
    assert client.get(JOBS, headers=bearer(TOKEN)).status_code == 200


def test_guesses_do_not_lock_out_those_who_share_the_address_of_the_guesser(guessed):
    client = guessed("10.0.0.9")
    assert client.get(JOBS, headers=bearer(TOKEN)).status_code == 200
    told = [client.get(JOBS, headers=bearer(f"guess-{number}")).status_code for number in range(42)]
    assert told == [401] * 40 + [429] * 2
    assert client.get(JOBS, headers=bearer(TOKEN)).status_code == 200
    assert client.get(JOBS, headers=bearer("one more guess")).status_code == 429


def test_an_agent_that_repeats_a_token_of_yesterday_locks_its_neighbors_out_of_nothing(guessed):
    client = guessed("10.0.0.9")
    assert {client.get(JOBS, headers=bearer("of yesterday")).status_code for _ in range(100)} == {401}
    assert client.get(JOBS, headers=bearer(TOKEN)).status_code == 200


@pytest.mark.parametrize("typed", [TOKEN, f" {TOKEN}", f"{TOKEN}\n"])
@pytest.mark.parametrize("set_as", [TOKEN, f"{TOKEN}\n", f"  {TOKEN} "])
def test_blanks_around_the_secret_do_not_count(locked, set_as, typed):
    settings = ServerSettings(database="x", token=set_as)
    assert SharedSecretAuth(settings.token, locked.app.state.services.database).matches(typed)


@pytest.mark.parametrize("set_as", ["", " ", "\n"])
def test_blanks_are_no_secret(set_as):
    assert ServerSettings(database="x", token=set_as).token is None


@pytest.mark.parametrize("path", ["/", JOBS, "/docs", "/nowhere", "/static/app.css", "/healthz"])
def test_every_answer_tells_the_browser_what_to_refuse(anyone, path):
    headers = anyone.get(path).headers
    assert headers["content-security-policy"] == CONTENT_SECURITY_POLICY
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "same-origin"
    assert headers["cross-origin-opener-policy"] == "same-origin"


@pytest.mark.parametrize("path", [JOBS, "/nowhere", "/static/nowhere.css", "/static/"])
def test_what_jobs_do_and_what_is_not_there_is_not_kept_by_caches(anyone, path):
    assert anyone.get(path).headers["cache-control"] == "no-store"


@pytest.mark.parametrize("path", ["/login", "/nowhere", "/static/app.css", "/static/nowhere.css"])
def test_over_https_browsers_are_told_to_stay_there(anyone, tmp_path, path):
    name = "strict-transport-security"
    assert anyone.get(f"https://127.0.0.1:7117{path}").headers[name] == "max-age=31536000"
    assert name not in anyone.get(path).headers
    settings = ServerSettings(database=str(tmp_path / "x.db"), address="https://holdfast.example")
    with TestClient(create_app(settings), base_url=BASE_URL) as client:  # behind a proxy that does not say so
        assert client.get(path).headers[name] == "max-age=31536000"


def test_the_secret_is_not_in_what_the_settings_print():
    assert TOKEN not in repr(ServerSettings(database="x", token=TOKEN))


# ---- authentication backends ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ({}, "NoAuth"),
        ({"host": "0.0.0.0"}, "AccountsAuth"),
        ({"host": "0.0.0.0", "token": TOKEN}, "SharedSecretAuth"),
        ({"token": TOKEN}, "SharedSecretAuth"),
        ({"accounts": True, "token": TOKEN}, "AccountsAuth"),
        ({"accounts": True}, "AccountsAuth"),
        ({"accounts": False, "host": "::", "token": TOKEN}, "SharedSecretAuth"),
        ({"address": "https://holdfast.example"}, "AccountsAuth"),
        ({"address": "http://203.0.113.9:7117"}, "AccountsAuth"),
        ({"allowed_hosts": ("localhost", "holdfast.example")}, "AccountsAuth"),
        ({"address": "https://holdfast.example", "token": TOKEN}, "SharedSecretAuth"),
        ({"address": "http://localhost:7117", "allowed_hosts": ("127.0.0.1",)}, "NoAuth"),
    ],
)
def test_nobody_who_comes_from_outside_finds_it_open(tmp_path, given, kind):
    app = create_app(ServerSettings(database=str(tmp_path / "x.db"), **given))
    with TestClient(app, base_url=BASE_URL) as client:
        assert type(app.state.services.auth).__name__ == kind
        assert client.get(JOBS).status_code == (200 if kind == "NoAuth" else 401)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.com", "0"])
def test_nor_can_anybody_ask_for_that(tmp_path, host):
    app = create_app(ServerSettings(database=str(tmp_path / "x.db"), host=host, accounts=False))
    with pytest.raises(ValueError, match="needs accounts"), TestClient(app):
        pass


@pytest.mark.parametrize(
    "given", [{"address": "https://holdfast.example"}, {"allowed_hosts": ("holdfast.example",)}]
)
def test_nor_under_a_public_name(tmp_path, given):
    app = create_app(ServerSettings(database=str(tmp_path / "x.db"), accounts=False, **given))
    with pytest.raises(ValueError, match=r"holdfast\.example lets other machines reach"), TestClient(app):
        pass


FORWARDED = [
    {"Forwarded": "for=203.0.113.9"}, {"X-Forwarded-For": "203.0.113.9"}, {"X-Forwarded-Proto": "https"},
    {"X-Forwarded-Host": "holdfast.example"}, {"X-Real-IP": "203.0.113.9"}, {"Via": "1.1 proxy"},
]  # fmt: skip


@pytest.mark.parametrize("headers", FORWARDED)
@pytest.mark.parametrize("path", ["/", JOBS, "/metrics", "/static/app.css"])
def test_without_authentication_nothing_is_served_through_a_proxy(anyone, path, headers):
    reply = anyone.get(path, headers=headers)
    assert (reply.status_code, reply.json()["error"]) == (403, "behind_a_proxy")
    assert "--address" in reply.json()["message"]
    assert "HOLDFAST_TOKEN" in reply.json()["message"]


def test_nor_is_anything_written(anyone):
    headers = {"X-Forwarded-For": "203.0.113.9"}
    assert anyone.patch(f"{JOBS}/j/desired", json={"paused": True}, headers=headers).status_code == 403
    assert anyone.post("/api/v1/ingest", content=b"", headers=headers).status_code == 403


def test_with_authentication_a_proxy_may_forward(locked):
    assert locked.get("/login", headers={"X-Forwarded-For": "203.0.113.9"}).status_code == 200
    headers = {"X-Forwarded-For": "203.0.113.9"} | bearer(TOKEN)
    assert locked.get(JOBS, headers=headers).status_code == 200


def test_once_there_are_people_they_are_asked_for(tmp_path):
    settings = ServerSettings(database=str(tmp_path / "x.db"))
    with TestClient(create_app(settings), base_url=BASE_URL) as client:
        assert client.get(JOBS).status_code == 200
        AccountsServer(client, lambda: 1e9).person("ada", admin=True)
    with TestClient(create_app(settings), base_url=BASE_URL) as client:
        assert client.get(JOBS).status_code == 401


# ---- slow bodies ----------------------------------------------------------------------------


PART = bytes(600 * 2**10)


@pytest.mark.parametrize(
    ("parts", "ends", "status"),
    [([b"some"], False, 408), ([b"some", b"more"], True, 200), ([PART], True, 200), ([PART, PART], True, 413)],
)
def test_a_body_must_come_in_time_and_its_parts_are_counted(parts, ends, status):
    app = FastAPI()
    app.add_middleware(BodyMiddleware, seconds=10 if ends else 0.01)

    @app.post("/")
    async def read(request: Request):
        return PlainTextResponse(str(len(await request.body())))

    answered = []
    sent = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    if ends:
        sent[-1]["more_body"] = False

    async def receive():
        if not sent:
            await anyio.sleep_forever()
        return sent.pop(0)

    async def send(message):
        answered.append(message)

    scope = {"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": [],
             "scheme": "http", "http_version": "1.1", "root_path": "", "raw_path": b"/",
             "state": {"route": None}}  # fmt: skip
    anyio.run(app, scope, receive, send)
    assert answered[0]["status"] == status


# ---- secrets --------------------------------------------------------------------------------


@ON_BOTH
def test_no_secret_is_in_what_is_logged_shown_or_stored(stage: AccountsServer, caplog, request):
    """Canaries through everything that takes one."""
    caplog.set_level(logging.DEBUG)
    stage.person_with_password("ada", admin=True)
    signed_in = stage.sign_in("ada")
    session = signed_in.headers["set-cookie"].partition("=")[2].partition(";")[0]
    browser = {"Cookie": f"{COOKIE}={session}"} | OURS
    made = stage.client.post(
        "/api/v1/tokens", json={"name": "canary", "scopes": ["read"], "project": "default"}, headers=browser
    ).json()["token"]
    link = people.reset_link(stage.db, "ada", who="ada", now=stage.clock())
    stage.client.post("/reset", data={"code": link, "password": "the second sentence"}, headers=OURS)
    stage.sign_in("ada", "a wrong-password-canary")
    bearer = {"Authorization": f"Bearer {made}"}
    shown = [
        stage.client.get(path, headers=bearer).text for path in (JOBS, "/docs", "/nowhere", "/metrics", "/audit")
    ]
    shown += [
        stage.client.get(path, headers=stage.cookie("ada")).text
        for path in ("/", "/settings", "/settings/keys", "/settings/people", "/audit", "/audit/export", "/nowhere")
    ]
    stage.client.get(JOBS, headers={"Authorization": "Bearer hf_wrong-canary"})
    canaries = [
        PASSWORD,
        "the second sentence",
        "wrong-password-canary",
        session,
        made[14:],
        link[4:],
        "wrong-canary",
    ]
    for where, text in (("log", caplog.text), ("pages", "\n".join(shown)), ("database", dump(stage))):
        assert [canary for canary in canaries if canary in text] == [], where
    assert "canary" in "\n".join(shown), "the name of a key is no secret"
    row = tokens.list_tokens(stage.db, asker=OPERATOR, now=stage.clock())[0]
    assert made[14:] not in repr(row)
