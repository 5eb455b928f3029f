"""Signing in through an identity provider: a real one, that signs real tokens, on a port of its own."""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from urllib.parse import parse_qs, parse_qsl, urlencode, urlsplit

import pytest
import uvicorn
from joserfc import jwt
from joserfc.jwk import OctKey, RSAKey
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.testclient import TestClient

from holdfast_server.accounts import people, projects, tokens
from holdfast_server.core.oidc_settings import Grant, ProviderSettings, from_environment
from holdfast_server.core.principal import OPERATOR, Principal, Role, Scope
from holdfast_server.http.auth_middleware import HOST_PREFIX
from holdfast_web import create_app
from holdfast_web.accounts.routes import STATE_COOKIE
from tests.support.accounts_server import BASE_URL, AccountsServer
from tests.support.postgres import ON_BOTH
from tests.support.server_fixtures import sqlite_unless_marked as sqlite_unless_marked

CLIENT, SECRET = "holdfast", "the-clients-secret-of-some-length"


@dataclass
class IdentityProvider:
    """Its endpoints, as small as OpenID Connect allows; what it says of whoever signs in may be changed."""

    issuer: str = ""
    claims: dict[str, object] = field(default_factory=dict)
    userinfo: dict[str, object] = field(default_factory=dict)
    algorithm: str = "RS256"
    key: RSAKey = field(default_factory=lambda: RSAKey.generate_key(2048, {"kid": "one"}))
    signing_key: RSAKey | OctKey | None = None
    asked: dict[str, dict[str, str]] = field(default_factory=dict)
    """By code, what the browser came with."""

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/.well-known/openid-configuration", self.describe),
                Route("/keys", self.keys),
                Route("/authorize", self.authorize),
                Route("/token", self.token, methods=["POST"]),
                Route("/userinfo", self.more),
            ]
        )

    async def describe(self, _: Request) -> Response:
        return JSONResponse(
            {
                "issuer": self.issuer,
                "authorization_endpoint": f"{self.issuer}/authorize",
                "token_endpoint": f"{self.issuer}/token",
                "jwks_uri": f"{self.issuer}/keys",
                "userinfo_endpoint": f"{self.issuer}/userinfo",
                "response_types_supported": ["code"],
                "id_token_signing_alg_values_supported": ["RS256", "HS256", "none"],
            }
        )

    async def keys(self, _: Request) -> Response:
        return JSONResponse({"keys": [self.key.as_dict(private=False)]})

    async def authorize(self, request: Request) -> Response:
        asked = dict(request.query_params)
        assert (asked["response_type"], asked["client_id"]) == ("code", CLIENT)
        assert asked["code_challenge_method"] == "S256"
        code = secrets.token_urlsafe()
        self.asked[code] = asked
        return RedirectResponse(f"{asked['redirect_uri']}?{urlencode({'code': code, 'state': asked['state']})}")

    async def token(self, request: Request) -> Response:
        form = dict(parse_qsl((await request.body()).decode()))
        asked = self.asked.pop(form["code"], None)
        basic = base64.b64encode(f"{CLIENT}:{SECRET}".encode()).decode()
        challenge = base64.urlsafe_b64encode(hashlib.sha256(form["code_verifier"].encode()).digest()).rstrip(b"=")
        if asked is None or challenge.decode() != asked["code_challenge"]:
            return JSONResponse({"error": "invalid_grant"}, 400)
        assert request.headers["authorization"] == f"Basic {basic}"
        assert form["redirect_uri"] == asked["redirect_uri"]
        now = int(time.time())
        claims = {"iss": self.issuer, "aud": CLIENT, "iat": now, "exp": now + 60, "nonce": asked["nonce"]}
        header = {"alg": self.algorithm, "kid": "one"}
        signed = jwt.encode(
            header, claims | {"sub": "subject-1"} | self.claims, self.signing_key or self.key, [self.algorithm]
        )
        return JSONResponse({"access_token": "access", "token_type": "Bearer", "id_token": signed})

    async def more(self, request: Request) -> Response:
        assert request.headers["authorization"] == "Bearer access"
        return JSONResponse({"sub": "subject-1"} | self.userinfo)


@pytest.fixture
def provider() -> Iterator[IdentityProvider]:
    made = IdentityProvider(claims={"preferred_username": "Ada", "groups": ["research"]})
    listener = socket.create_server(("127.0.0.1", 0))
    made.issuer = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = uvicorn.Server(uvicorn.Config(made.app(), log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    yield made
    server.should_exit = True
    thread.join()
    listener.close()


@pytest.fixture
def told(settings, clock, provider) -> Iterator[AccountsServer]:
    grants = (
        Grant("research", Role.operator, "vision"),
        Grant("research", Role.viewer, "speech"),
        Grant("admins", Role.admin, None),
    )
    oidc = ProviderSettings(
        issuer=provider.issuer, client_id=CLIENT, client_secret=SECRET, grants=grants, label="Example Ltd."
    )
    app = create_app(replace(settings, accounts=True, provider=oidc), clock=clock)
    with TestClient(app, base_url=BASE_URL, follow_redirects=False) as client:
        yield AccountsServer(client, clock)


def at_the_provider(stage: AccountsServer, then: str = "/jobs/x"):
    """To the provider, through it, and back to our door: the address that the browser is sent to."""
    import httpx2

    begun = stage.client.get("/login/provider", params={"next": then})
    assert begun.status_code == 303
    return httpx2.get(begun.headers["location"]).headers["location"]


def signed_in(stage: AccountsServer, then: str = "/jobs/x"):
    return stage.client.get(at_the_provider(stage, then))


def refusal(stage: AccountsServer) -> str:
    reply = signed_in(stage)
    assert (reply.status_code, "holdfast_session" in reply.headers.get("set-cookie", "")) == (403, False)
    assert [row.name for row in people.list_people(stage.db)] == []
    return reply.text


@ON_BOTH
def test_the_whole_way(told: AccountsServer):
    page = " ".join(told.client.get("/login?next=/jobs/x").text.split())
    assert "Sign in with Example Ltd." in page
    assert 'href="/login/provider?next=/jobs/x"' in page
    reply = signed_in(told)
    assert (reply.status_code, reply.headers["location"]) == (303, "/jobs/x")
    (ada,) = people.list_people(told.db)
    assert (ada.name, ada.admin, ada.roles) == ("ada", False, {"vision": "operator", "speech": "viewer"})
    assert ada.signs_in_by == "identity provider"
    assert told.client.get("/settings").status_code == 200
    assert told.sign_in("ada", "").status_code == 401


@ON_BOTH
def test_what_the_groups_are_by_now_counts(told: AccountsServer, provider):
    signed_in(told)
    provider.claims["groups"] = ["admins"]
    signed_in(told)
    (ada,) = people.list_people(told.db)
    assert (ada.admin, ada.roles) == (True, {})
    provider.claims["groups"] = []
    assert signed_in(told).status_code == 403
    told.client.cookies.clear()


def test_with_the_groups_go_the_keys_that_went_beyond_them_and_in_the_end_all_else(told: AccountsServer, provider):
    provider.claims["groups"] = ["admins"]
    signed_in(told)
    projects.add(told.db, "vision", who="test", now=told.clock())
    admin = tokens.create(told.db, wish("admin"), maker=ADA, now=told.clock())[1].prefix
    reading = tokens.create(told.db, wish("read"), maker=ADA, now=told.clock())[1].prefix
    provider.claims["groups"] = ["research"]
    signed_in(told)
    assert states(told) == {admin: "revoked", reading: "works"}
    provider.claims["groups"] = []
    assert signed_in(told).status_code == 403
    assert states(told) == {admin: "revoked", reading: "revoked"}
    assert told.client.get("/settings").status_code == 401, "her browsers are signed out"
    (ada,) = people.list_people(told.db)
    assert (ada.admin, ada.roles) == (False, {})
    told.client.cookies.clear()


ADA = Principal(kind="person", name="ada", admin=True)


def wish(scope: Scope) -> tokens.TokenRequest:
    return tokens.TokenRequest(name="k", scopes=[scope], project="vision")


def states(stage: AccountsServer) -> dict[str, str]:
    rows = tokens.list_tokens(stage.db, asker=OPERATOR, now=stage.clock())
    return {row.prefix: row.state for row in rows}


def test_groups_may_come_from_userinfo(told: AccountsServer, provider):
    del provider.claims["groups"]
    provider.userinfo["groups"] = "research admins"
    assert signed_in(told).status_code == 303
    assert people.list_people(told.db)[0].admin


def test_userinfo_of_somebody_else_is_not_believed(told: AccountsServer, provider):
    del provider.claims["groups"]
    provider.userinfo |= {"groups": ["admins"], "sub": "somebody-else"}
    assert "has no rights" in refusal(told)


def test_who_is_in_no_group_of_ours_is_told_so(told: AccountsServer, provider):
    provider.claims["groups"] = ["sales"]
    assert "has no rights on this server" in refusal(told)


def test_a_name_that_somebody_has_here_is_not_given_away(told: AccountsServer):
    told.person("ada", admin=True)
    reply = signed_in(told)
    assert (reply.status_code, "belongs to an account with a password" in reply.text) == (403, True)


@ON_BOTH
def test_a_person_is_who_they_are_whatever_they_call_themselves(told: AccountsServer, provider):
    signed_in(told)
    provider.claims["preferred_username"] = "root"
    signed_in(told)
    assert [row.name for row in people.list_people(told.db)] == ["ada"]


@pytest.mark.parametrize(
    "claims",
    [
        {"aud": "another-client"},
        {"iss": "https://evil.example"},
        {"nonce": "another"},
        {"exp": 1},
        {"sub": None},
        {"azp": "another-client"},
        {"preferred_username": None, "email": None},
        {"preferred_username": "<script>"},
    ],
)
def test_a_token_that_is_not_for_us_is_refused(told: AccountsServer, provider, claims):
    provider.claims |= claims
    refusal(told)


def test_a_token_signed_by_somebody_else_is_refused(told: AccountsServer, provider):
    provider.signing_key = RSAKey.generate_key(2048, {"kid": "one"})
    refusal(told)


def test_a_token_signed_with_our_own_secret_is_refused(told: AccountsServer, provider):
    provider.algorithm, provider.signing_key = "HS256", OctKey.import_key(SECRET)
    refusal(told)


def test_a_token_signed_by_nobody_is_refused(told: AccountsServer, provider):
    made = jwt.encode

    def unsigned(header, claims, key, algorithms):
        parts = [base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=").decode()
                 for part in ({"alg": "none"}, claims)]  # fmt: skip
        return ".".join([*parts, ""])

    jwt.encode = unsigned
    try:
        refusal(told)
    finally:
        jwt.encode = made


def test_another_browsers_sign_in_is_not_taken_over(told: AccountsServer):
    """Somebody lures a person to where their own sign-in ends: the person would be signed in as them."""
    theirs = at_the_provider(told)
    told.client.cookies.clear()
    assert told.client.get(theirs).status_code == 403
    at_the_provider(told)
    assert told.client.get(theirs).status_code == 403


def test_nor_over_https_with_a_cookie_that_a_sibling_domain_can_set(told: AccountsServer):
    import httpx2

    https, client = "https://127.0.0.1:7117", told.client
    for name, status in ((STATE_COOKIE, 403), (HOST_PREFIX + STATE_COOKIE, 303)):
        begun = client.get(f"{https}/login/provider")
        (state,) = (value for kept, value in client.cookies.items() if kept == HOST_PREFIX + STATE_COOKIE)
        back = httpx2.get(begun.headers["location"]).headers["location"]
        client.cookies.clear()
        assert client.get(back, headers={"Cookie": f"{name}={state}"}).status_code == status


@ON_BOTH
def test_a_sign_in_is_finished_once_and_in_time(told: AccountsServer, clock):
    back = at_the_provider(told)
    cookies = dict(told.client.cookies)
    assert told.client.get(back).status_code == 303
    told.client.cookies.clear()
    told.client.cookies.update(cookies)
    assert told.client.get(back).status_code == 403
    late = at_the_provider(told)
    clock.now += 601
    assert told.client.get(late).status_code == 403


def test_a_state_that_was_made_up_is_refused(told: AccountsServer):
    code = parse_qs(urlsplit(at_the_provider(told)).query)["code"][0]
    for state in ("", "made-up"):
        told.client.cookies.clear()
        told.client.cookies.set("holdfast_provider", state)
        reply = told.client.get("/login/provider/back", params={"code": code, "state": state})
        assert reply.status_code == 403


def test_nobody_is_sent_to_another_site(told: AccountsServer):
    assert signed_in(told, "//evil.example").headers["location"] == "/"


def test_a_provider_that_calls_itself_otherwise_is_not_believed(told: AccountsServer, provider):
    provider.issuer = "https://evil.example"
    reply = told.client.get("/login/provider")
    assert (reply.status_code, "its issuer is" in reply.text) == (403, True)


def test_without_a_provider_there_is_nothing_to_go_to(stage: AccountsServer):
    for path in ("/login/provider", "/login/provider/back?code=x&state=y"):
        assert stage.client.get(path).headers["location"] == "/login"


# ---- its settings ---------------------------------------------------------------------------

ENVIRONMENT = {
    "HOLDFAST_OIDC_ISSUER": "https://id.example",
    "HOLDFAST_OIDC_CLIENT_ID": "holdfast",
    "HOLDFAST_OIDC_CLIENT_SECRET": "secret",
    "HOLDFAST_OIDC_ROLES": "ml-admins=admin, research = operator@vision,*=viewer@default",
}


def test_it_is_set_in_the_environment():
    made = from_environment(ENVIRONMENT | {"HOLDFAST_OIDC_LABEL": "Example", "PATH": "/bin"})
    assert made.grants == (
        Grant("ml-admins", Role.admin, None),
        Grant("research", Role.operator, "vision"),
        Grant("*", Role.viewer, "default"),
    )
    assert (made.issuer, made.label, made.groups_claim) == ("https://id.example", "Example", "groups")
    assert "secret" not in repr(made).replace("client_secret", "")
    assert from_environment({"PATH": "/bin", "HOLDFAST_OIDC_ISSUER": " "}) is None


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"HOLDFAST_OIDC_ISSUER": ""}, "ISSUER is missing"),
        ({"HOLDFAST_OIDC_ROLES": ""}, "ROLES is missing"),
        ({"HOLDFAST_OIDC_ROLES": "x=viewer"}, "x=viewer"),
        ({"HOLDFAST_OIDC_ROLES": "x=emperor@default"}, "emperor"),
        ({"HOLDFAST_OIDC_ROLES": "=admin"}, "=admin"),
        ({"HOLDFAST_OIDC_CLIENT": "x"}, "unknown setting HOLDFAST_OIDC_CLIENT:"),
    ],
)
def test_what_is_wrong_is_named(changed, named):
    with pytest.raises(ValueError, match=named):
        from_environment(ENVIRONMENT | changed)


@pytest.mark.parametrize("issuer", ["http://id.example", "ftp://id.example", "id.example"])
def test_who_somebody_is_does_not_come_over_plain_http(issuer):
    with pytest.raises(ValueError, match="https"):
        from_environment(ENVIRONMENT | {"HOLDFAST_OIDC_ISSUER": issuer})
