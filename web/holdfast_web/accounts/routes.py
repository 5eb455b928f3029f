"""Signing in and out, first set-up, password links. Every form works without scripts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, ClassVar

from fastapi import Form, Query, Request
from fastapi.responses import RedirectResponse, Response

from holdfast_server.accounts import people, rate_limits, sign_ins
from holdfast_server.accounts.auth_backends import SharedSecretAuth
from holdfast_server.accounts.oidc import CALLBACK, FLOW_SECONDS
from holdfast_server.accounts.sign_ins import Visitor
from holdfast_server.api.endpoints import Router
from holdfast_server.core.access import LISTS, PERSON, PUBLIC
from holdfast_server.core.errors import LinkExpired, RequestRefused, TooManySignInAttempts
from holdfast_server.core.settings import ServerSettings
from holdfast_server.http.auth_middleware import (
    COOKIE,
    DEVICE_COOKIE,
    address_of,
    cookie_name,
    cookie_of,
    over_https,
)
from holdfast_server.http.dependencies import Asker, Config, Db, Now
from holdfast_server.http.services import Services, services_of
from holdfast_web.shared.render import View
from holdfast_web.shared.routing import Text, headers_of, local_path

STATE_COOKIE = "holdfast_provider"
DEVICE_SECONDS = 365 * 86400
AGAIN = "This action needs a sign-in within the last hour. Sign in and try again."

router = Router(threads="accounts")

Then = Annotated[str, Form(alias="next")]


@dataclass(frozen=True, kw_only=True)
class LoginPage(View):
    template: ClassVar[str] = "accounts/login.html"
    accounts: bool
    then: str
    """The path to open after the sign-in."""
    refused: str = ""
    name: str = ""
    provider: str = ""
    """The label of the identity provider's button."""
    empty: bool = False
    """Whether the server is not set up yet."""


@dataclass(frozen=True, kw_only=True)
class LinkPage(View):
    """The target page of a one-time link: first set-up, or a new password."""

    template: ClassVar[str] = "accounts/link.html"
    setup: bool
    refused: str = ""
    name: str = ""
    code: str = ""


@router.endpoint("GET", "/login", access=PUBLIC)
def login_page(
    request: Request, db: Db, then: Annotated[str, Query(alias="next")] = "/", again: bool = False
) -> Response:
    return _login_page(request, db, then, refused=AGAIN if again else "").response()


def _login_page(request: Request, db: Db, then: str, *, refused: str = "", name: str = "") -> LoginPage:
    accounts = services_of(request.app).auth.has_accounts
    provider = services_of(request.app).provider
    empty = False
    if accounts and provider is None:
        with db.read() as session:
            empty = not people.has_people(session)
    return LoginPage(
        accounts=accounts,
        then=local_path(then),
        refused=refused,
        name=name,
        provider=provider.settings.label if accounts and provider else "",
        empty=empty,
    )


@router.endpoint("POST", "/login", access=PUBLIC)
def login(
    request: Request,
    db: Db,
    now: Now,
    name: Text = "",
    password: Text = "",
    token: Text = "",
    then: Then = "/",
) -> Response:
    auth = services_of(request.app).auth
    if not auth.has_accounts:
        return _shared(request, db, token, then, now=now)
    try:
        secret = sign_ins.with_password(db, name, password, visitor(request), now=now)
    except RequestRefused as refusal:
        page = _login_page(request, db, then, refused=sentence(refusal), name=name)
        return _refused(page, refusal, 401)
    return signed_in(request, secret, then, device=sign_ins.new_device(db, name))


def _shared(request: Request, db: Db, token: str, then: str, *, now: float) -> Response:
    auth = services_of(request.app).auth
    if not isinstance(auth, SharedSecretAuth):
        return RedirectResponse(local_path(then), 303)  # this server needs no sign-in
    try:
        rate_limits.take_address_attempt(db, visitor(request).address, now=now)
    except TooManySignInAttempts as refusal:
        return _refused(_login_page(request, db, then, refused=sentence(refusal)), refusal, 401)
    if not auth.matches(token):
        refused = "Wrong shared secret." if token.strip() else "Enter the shared secret."
        return _login_page(request, db, then, refused=refused).response(401)
    return signed_in(request, auth.begin_session(now=now), then)


def _refused(page: LoginPage | LinkPage, refusal: RequestRefused, status: int) -> Response:
    return page.response(status if refusal.retry_seconds is None else refusal.status, headers_of(refusal))


@router.endpoint("POST", "/logout", access=PERSON)
def logout(request: Request, db: Db, now: Now, asker: Asker) -> Response:
    auth, cookie = services_of(request.app).auth, cookie_of(request.scope, COOKIE)
    if asker.sign_in_id is not None:
        sign_ins.end(db, asker, asker.sign_in_id, now=now)
    elif isinstance(auth, SharedSecretAuth) and cookie is not None:
        auth.end_session(cookie)
    response = RedirectResponse("/login", 303)
    _delete_cookie(request, response, COOKIE)
    return response


@router.endpoint("GET", "/session", access=LISTS, status=204)
def session() -> None:
    """Answer an open page that asks whether its browser is still signed in."""


# ---- one-time links ------------------------------------------------------------------------


@router.endpoint("GET", "/setup", access=PUBLIC)
def setup_page() -> Response:
    return LinkPage(setup=True).response()


@router.endpoint("POST", "/setup", access=PUBLIC)
def setup(request: Request, db: Db, now: Now, code: Text = "", name: Text = "", password: Text = "") -> Response:
    chosen = partial(people.create_first_admin, db, code, name, password, now=now)
    page = LinkPage(setup=True, name=name, code=code)
    return _sign_in_by_link(request, db, page, chosen, by="setup link", now=now)


@router.endpoint("GET", "/reset", access=PUBLIC)
def reset_page() -> Response:
    return LinkPage(setup=False).response()


@router.endpoint("POST", "/reset", access=PUBLIC)
def reset(request: Request, db: Db, now: Now, code: Text = "", password: Text = "") -> Response:
    chosen = partial(people.choose_password, db, code, password, now=now)
    return _sign_in_by_link(request, db, LinkPage(setup=False, code=code), chosen, by="link", now=now)


def _sign_in_by_link(
    request: Request, db: Db, page: LinkPage, choose: Callable[[], str], *, by: str, now: float
) -> Response:
    """Sign in the person whose password was chosen, or answer with the page and the reason of a refusal."""
    try:
        person = choose()
        secret = sign_ins.begin(db, person, visitor(request), by=by, now=now)
    except RequestRefused as refusal:
        kept = "" if isinstance(refusal, LinkExpired) else page.code
        return _refused(replace(page, refused=sentence(refusal), code=kept), refusal, 422)
    return signed_in(request, secret, "/", device=sign_ins.new_device(db, person))


# ---- identity provider ----------------------------------------------------------------------


@router.endpoint("GET", "/login/provider", access=PUBLIC)
def to_provider(
    request: Request, db: Db, config: Config, now: Now, then: Annotated[str, Query(alias="next")] = "/"
) -> Response:
    provider = services_of(request.app).provider
    if provider is None or not services_of(request.app).auth.has_accounts:
        return RedirectResponse("/login", 303)
    address, state = provider.begin(
        db, visitor(request), back=_back(request, config), then=local_path(then), now=now
    )
    response = RedirectResponse(address, 303)
    _set_cookie(request, response, STATE_COOKIE, state, seconds=int(FLOW_SECONDS))
    return response


@router.endpoint("GET", "/login/provider/back", access=PUBLIC)
def from_provider(request: Request, db: Db, config: Config, now: Now, code: str = "", state: str = "") -> Response:
    provider = services_of(request.app).provider
    if provider is None or not services_of(request.app).auth.has_accounts:
        return RedirectResponse("/login", 303)
    try:
        secret, then = provider.finish(
            db, visitor(request), back=_back(request, config), code=code, state=state,
            kept=cookie_of(request.scope, STATE_COOKIE) or "", now=now,
        )  # fmt: skip
    except RequestRefused as refusal:
        response: Response = _login_page(request, db, "/", refused=sentence(refusal)).response(403)
    else:
        response = signed_in(request, secret, then)
    _delete_cookie(request, response, STATE_COOKIE)
    return response


def _back(request: Request, config: ServerSettings) -> str:
    return public_address(request, config) + CALLBACK


# ---- shared helpers --------------------------------------------------------------------------


def public_address(request: Request, config: ServerSettings) -> str:
    return (config.address or f"{request.url.scheme}://{request.url.netloc}").rstrip("/")


def visitor(request: Request) -> Visitor:
    return Visitor(
        address=address_of(request.scope),
        browser=request.headers.get("user-agent", ""),
        replaces=cookie_of(request.scope, COOKIE),
        device=cookie_of(request.scope, DEVICE_COOKIE),
    )


def signed_in(request: Request, secret: str, then: str, *, device: str | None = None) -> Response:
    response = RedirectResponse(_page_at(services_of(request.app), local_path(then)), 303)
    _set_cookie(request, response, COOKIE, secret, seconds=int(sign_ins.LASTS_SECONDS))
    remember_device(request, response, device)
    return response


def _page_at(services: Services, address: str) -> str:
    """Return the address; for one that only takes forms, that of the nearest page above it."""
    path = address.partition("?")[0]
    if services.find_route("GET", path) or not services.find_route("POST", path):
        return address
    while path.strip("/") and services.find_route("GET", path) is None:
        path = path.rpartition("/")[0]
    return path or "/"


def remember_device(request: Request, response: Response, device: str | None) -> None:
    if device is not None:
        _set_cookie(request, response, DEVICE_COOKIE, device, seconds=DEVICE_SECONDS)


def _set_cookie(request: Request, response: Response, name: str, value: str, *, seconds: int) -> None:
    response.set_cookie(
        cookie_name(request.scope, name), value, max_age=seconds, path="/", secure=over_https(request.scope),
        httponly=True, samesite="lax",
    )  # fmt: skip


def _delete_cookie(request: Request, response: Response, name: str) -> None:
    secure = over_https(request.scope)
    response.delete_cookie(cookie_name(request.scope, name), secure=secure, httponly=True, samesite="lax")


def sentence(refusal: RequestRefused) -> str:
    text = str(refusal)
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")
