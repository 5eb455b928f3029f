"""Signing in and out, and the two links that work once. Every form works without scripts."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Form, Query, Request
from fastapi.responses import RedirectResponse, Response

from holdfast_server.accounts import allowances, people, sign_ins
from holdfast_server.accounts.doors import SharedSecret
from holdfast_server.accounts.gate import COOKIE, SECURE_COOKIE, session_of
from holdfast_server.accounts.provider import CALLBACK, HANDSHAKE_SECONDS, Provider
from holdfast_server.accounts.sign_ins import Visitor
from holdfast_server.dependencies import Asker, Clock, Config, Db
from holdfast_server.errors import DeadLink, NotSignedIn, Refused, TooManyTries
from holdfast_server.settings import ServerSettings
from holdfast_web.account_pages import LinkPage, LoginPage
from holdfast_web.routing import PageRoute, Text, local

STATE_COOKIE = "holdfast_provider"
AGAIN = "A restore, or a new key, takes a password that was typed within the hour: sign in, and ask for it again."

router = APIRouter(route_class=PageRoute, include_in_schema=False)

Then = Annotated[str, Form(alias="next")]


@router.get("/login")
async def login_page(
    request: Request, db: Db, then: Annotated[str, Query(alias="next")] = "/", again: bool = False
) -> Response:
    return (await _login_page(request, db, then, refused=AGAIN if again else "")).response()


async def _login_page(request: Request, db: Db, then: str, *, refused: str = "", name: str = "") -> LoginPage:
    accounts = request.app.state.door.accounts
    provider: Provider | None = request.app.state.provider
    empty = False
    if accounts and provider is None:
        async with db.read() as session:
            empty = not await people.anybody(session)
    return LoginPage(
        accounts=accounts,
        then=local(then),
        refused=refused,
        name=name,
        provider=provider.settings.label if accounts and provider else "",
        empty=empty,
    )


@router.post("/login")
async def login(
    request: Request,
    db: Db,
    config: Config,
    clock: Clock,
    name: Text = "",
    password: Text = "",
    token: Text = "",
    then: Then = "/",
) -> Response:
    now, door = clock(), request.app.state.door
    if not door.accounts:
        return await _shared(request, db, config, token, then, now=now)
    try:
        secret = await sign_ins.with_password(db, name, password, visitor(request), now=now)
    except (NotSignedIn, TooManyTries) as refusal:
        return await _refused(await _login_page(request, db, then, refused=sentence(refusal), name=name), refusal)
    return signed_in(request, config, secret, then)


async def _shared(
    request: Request, db: Db, config: ServerSettings, token: str, then: str, *, now: float
) -> Response:
    door = request.app.state.door
    if not isinstance(door, SharedSecret):
        return RedirectResponse(local(then), 303)  # nobody has to sign in here
    try:
        await allowances.take_from_address(db, visitor(request).address, now=now)
    except TooManyTries as refusal:
        return await _refused(await _login_page(request, db, then, refused=sentence(refusal)), refusal)
    if not door.is_it(token):
        refused = "This is not the server's token." if token.strip() else "Type the server's token."
        return (await _login_page(request, db, then, refused=refused)).response(401)
    return signed_in(request, config, door.session(now=now), then)


async def _refused(page: LoginPage, refusal: Refused) -> Response:
    if isinstance(refusal, TooManyTries):
        return page.response(429, {"Retry-After": str(max(1, round(refusal.retry_seconds)))})
    return page.response(401)


@router.post("/logout")
async def logout(db: Db, clock: Clock, asker: Asker) -> Response:
    if asker.session is not None:
        await sign_ins.end(db, asker, asker.session, now=clock())
    response = RedirectResponse("/login", 303)
    for name, secure in ((SECURE_COOKIE, True), (COOKIE, False)):
        response.delete_cookie(name, secure=secure, httponly=True, samesite="lax")
    return response


# ---- links that work once -------------------------------------------------------------------


@router.get("/setup")
async def setup_page() -> Response:
    return LinkPage(setup=True).response()


@router.post("/setup")
async def setup(
    request: Request, db: Db, config: Config, clock: Clock, code: Text = "", name: Text = "", password: Text = ""
) -> Response:
    now = clock()
    try:
        person = await people.set_up(db, code, name, password, now=now)
        secret = await sign_ins.begin(db, person, visitor(request), by="setup link", now=now)
    except Refused as refusal:
        kept = "" if isinstance(refusal, DeadLink) else code
        return LinkPage(setup=True, refused=sentence(refusal), name=name, code=kept).response(422)
    return signed_in(request, config, secret, "/")


@router.get("/reset")
async def reset_page() -> Response:
    return LinkPage(setup=False).response()


@router.post("/reset")
async def reset(
    request: Request, db: Db, config: Config, clock: Clock, code: Text = "", password: Text = ""
) -> Response:
    now = clock()
    try:
        person = await people.choose_password(db, code, password, now=now)
        secret = await sign_ins.begin(db, person, visitor(request), by="link", now=now)
    except Refused as refusal:
        kept = "" if isinstance(refusal, DeadLink) else code
        return LinkPage(setup=False, refused=sentence(refusal), code=kept).response(422)
    return signed_in(request, config, secret, "/")


# ---- identity provider ----------------------------------------------------------------------


@router.get("/login/provider")
async def to_provider(
    request: Request, db: Db, config: Config, clock: Clock, then: Annotated[str, Query(alias="next")] = "/"
) -> Response:
    provider: Provider | None = request.app.state.provider
    if provider is None or not request.app.state.door.accounts:
        return RedirectResponse("/login", 303)
    address, state = await provider.begin(
        db, visitor(request), back=_back(request, config), then=local(then), now=clock()
    )
    response = RedirectResponse(address, 303)
    response.set_cookie(
        STATE_COOKIE, state, max_age=int(HANDSHAKE_SECONDS), path=CALLBACK, secure=_secure(request, config),
        httponly=True, samesite="lax",
    )  # fmt: skip
    return response


@router.get("/login/provider/back")
async def from_provider(
    request: Request, db: Db, config: Config, clock: Clock, code: str = "", state: str = ""
) -> Response:
    provider: Provider | None = request.app.state.provider
    if provider is None or not request.app.state.door.accounts:
        return RedirectResponse("/login", 303)
    try:
        secret, then = await provider.finish(
            db, visitor(request), back=_back(request, config), code=code, state=state,
            kept=request.cookies.get(STATE_COOKIE, ""), now=clock(),
        )  # fmt: skip
    except Refused as refusal:
        response: Response = (await _login_page(request, db, "/", refused=sentence(refusal))).response(403)
    else:
        response = signed_in(request, config, secret, then)
    response.delete_cookie(STATE_COOKIE, path=CALLBACK, httponly=True, samesite="lax")
    return response


def _back(request: Request, config: ServerSettings) -> str:
    return public_address(request, config) + CALLBACK


# ---- what these share -----------------------------------------------------------------------


def public_address(request: Request, config: ServerSettings) -> str:
    return (config.address or f"{request.url.scheme}://{request.url.netloc}").rstrip("/")


def visitor(request: Request) -> Visitor:
    return Visitor(
        address=request.client.host if request.client else "unknown",
        browser=request.headers.get("user-agent", ""),
        replaces=session_of(request.headers.get("cookie", "")),
    )


def signed_in(request: Request, config: ServerSettings, secret: str, then: str) -> Response:
    response = RedirectResponse(local(then), 303)
    secure = _secure(request, config)
    response.set_cookie(
        SECURE_COOKIE if secure else COOKIE, secret, max_age=int(sign_ins.LASTS_SECONDS), path="/", secure=secure,
        httponly=True, samesite="lax",
    )  # fmt: skip
    return response


def _secure(request: Request, config: ServerSettings) -> bool:
    return request.url.scheme == "https" or (config.address or "").startswith("https://")


def sentence(refusal: Refused) -> str:
    text = str(refusal)
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")
