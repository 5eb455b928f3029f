"""The gate: before any route, who asks and whether they may; nothing passes that the policy does not name."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import math
from collections.abc import Awaitable, Callable
from http.cookies import CookieError, SimpleCookie
from typing import cast
from urllib.parse import quote, urlsplit

from sqlalchemy.exc import SQLAlchemyError
from starlette.datastructures import Headers, State
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast_server.accounts import policy
from holdfast_server.accounts.auth_backends import Shown
from holdfast_server.core.errors import TooManyTries, UnknownJob
from holdfast_server.core.principal import NOBODY, OPERATOR, Principal, current
from holdfast_server.db import DatabaseBusy, DatabaseClosed, DatabaseUnavailable

COOKIE, DEVICE_COOKIE = "holdfast_session", "holdfast_device"
HOST_PREFIX = "__Host-"
"""Over HTTPS, the names of our cookies begin with it: browsers then accept them from this very host only."""
RECHECK_SECONDS = 2.0
"""How often the asker of a stream, or of a long poll, is looked at again: a right that was taken ends it."""
UNKNOWN = "unknown"
COMPLAINT_SECONDS = 60.0
"""From one line in the log to the next: thousands listen, and all of them cannot be looked up at once."""

logger = logging.getLogger(__name__)

UNANSWERED = (DatabaseClosed, DatabaseUnavailable, SQLAlchemyError)
"""What a database says that cannot be asked."""

Refuse = Callable[[Request, Exception], Awaitable[Response]]


class IdentityMiddleware:
    """Finds out who asks, and refuses only an address that guesses tokens."""

    def __init__(self, app: ASGIApp, *, refuse: Refuse) -> None:
        self.app = app
        self.refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            asker = await self._asker(scope)
        except (*UNANSWERED, DatabaseBusy, TooManyTries) as error:
            await (await self.refuse(Request(scope), error))(scope, receive, send)
            return
        scope.setdefault("state", {})["principal"] = asker
        token = current.set(asker)
        try:
            await self.app(scope, receive, send)
        finally:
            current.reset(token)

    async def _asker(self, scope: Scope) -> Principal:
        state = cast("State", scope["app"].state)
        found = policy.find(scope["method"], scope["path"])
        if state.door.accounts and found is not None and found.rule.where == "anybody":
            return NOBODY  # it makes no difference, and saves a look into the database
        asker: Principal = await state.door.who(shown_by(scope), now=state.clock())
        return asker


class PolicyMiddleware:
    """Lets through what the policy allows."""

    def __init__(self, app: ASGIApp, *, refuse: Refuse) -> None:
        self.app = app
        self.refuse = refuse
        self._complained_at = -math.inf

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # there are no other conversations: unanswered, a websocket is refused
        found = policy.find(scope["method"], scope["path"])
        asker = cast("Principal", scope["state"]["principal"])
        try:
            refused = await self._refused(scope, found, asker)
        except UNANSWERED as error:
            refused = await self.refuse(Request(scope), error)
        if refused is not None:
            await refused(scope, receive, send)
        elif found is not None and found.rule.lasting and asker is not OPERATOR:
            await self._watched(found, scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _refused(self, scope: Scope, found: policy.Found | None, asker: Principal) -> Response | None:
        request = Request(scope)
        if found is None:
            return ask_to_sign_in(request) if asker is NOBODY else await self._nothing_there(request)
        match await self._judged(scope, found, asker):
            case "allow" if policy.is_fresh(found, asker, now=scope["app"].state.clock()):
                return None
            case "allow":
                return ask_to_sign_in_again(request)
            case "sign in":
                return ask_to_sign_in(request)
            case "hide" if found.job is not None:
                return await self.refuse(request, UnknownJob(found.job))
            case "hide":
                return await self.refuse(request, HTTPException(404))
            case _:
                return await self.refuse(request, HTTPException(403, _too_little(asker)))

    async def _judged(self, scope: Scope, found: policy.Found, asker: Principal) -> policy.Verdict:
        alone = found.job is None or asker.kind == "nobody" or (asker.admin and asker.kind == "person")
        project = None if alone else await scope["app"].state.belonging.project_of(found.job)
        return policy.judge(found, asker, project)

    async def _nothing_there(self, request: Request) -> Response:
        others = [method for method in sorted(policy.METHODS) if policy.find(method, request.url.path)]
        if others:
            return await self.refuse(request, HTTPException(405, headers={"Allow": ", ".join(others)}))
        return await self.refuse(request, HTTPException(404))

    async def _watched(self, found: policy.Found, scope: Scope, receive: Receive, send: Send) -> None:
        """Breaks the answer off once whoever asked for it no longer may."""
        started = False

        async def send_on(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        answering = asyncio.create_task(self._answer(scope, receive, send_on))
        watching = asyncio.create_task(self._until_refused(found, scope))
        try:
            await asyncio.wait([answering, watching], return_when=asyncio.FIRST_COMPLETED)
        finally:
            # the answer has ended, its asker has lost the right to it, or has gone
            for task in (watching, answering):
                if not task.done():
                    task.cancel()
            ended = await asyncio.gather(answering, watching, return_exceptions=True)
        if watching.done() and not watching.cancelled() and not started:
            await ask_to_sign_in(Request(scope))(scope, receive, send)
        elif isinstance(ended[0], Exception):
            raise ended[0]

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)

    async def _until_refused(self, found: policy.Found, scope: Scope) -> None:
        state, known = scope["app"].state, scope["state"]["principal"]
        while True:
            await asyncio.sleep(RECHECK_SECONDS)
            try:
                asker = await state.door.who(shown_by(scope), now=state.clock())
                # thousands of agents wait at once, and what a key may do does not change
                unchanged = asker == known and asker.kind == "agent"
                if not unchanged and await self._judged(scope, found, asker) != "allow":
                    return
            except UNANSWERED as error:
                self._complain(error)

    def _complain(self, error: Exception) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._complained_at >= COMPLAINT_SECONDS:
            self._complained_at = now
            logger.warning("whether those who listen still may could not be looked up: %s", error)


def shown_by(scope: Scope) -> Shown:
    headers = Headers(scope=scope)
    scheme, _, token = headers.get("authorization", "").partition(" ")
    bearer = token.strip() if scheme.lower() == "bearer" else ("" if "authorization" in headers else None)
    return Shown(bearer, cookie_of(scope, COOKIE), address_of(scope))


def address_of(scope: Scope) -> str:
    """The client's address, which a proxy that is trusted says in `X-Forwarded-For`; `unknown` where that is none.

    What is no address would get around the limits for addresses, and into the audit log.
    """
    client = scope.get("client")
    try:
        # an IPv6 zone (fe80::1%eth0) may be any text
        return str(ipaddress.ip_address(client[0].partition("%")[0])) if client else UNKNOWN
    except ValueError:
        return UNKNOWN


def over_https(scope: Scope) -> bool:
    """Whether browsers reach this server over HTTPS, by what the connection says or by its public address."""
    address: str | None = scope["app"].state.settings.address
    return scope["scheme"] == "https" or (address or "").startswith("https://")


def cookie_name(scope: Scope, name: str) -> str:
    return HOST_PREFIX + name if over_https(scope) else name


def cookie_of(scope: Scope, name: str) -> str | None:
    """The value of our cookie. Over HTTPS only the prefixed one counts: a sibling domain can set the plain one."""
    cookies = SimpleCookie()
    with contextlib.suppress(CookieError):
        cookies.load(Headers(scope=scope).get("cookie", ""))
    found = cookies.get(cookie_name(scope, name))
    return None if found is None else str(found.value)


def ask_to_sign_in(request: Request) -> Response:
    """A page for people, a redirect for fragments, a sentence for programs."""
    if request.headers.get("hx-request") == "true":
        return Response(status_code=401, headers={"HX-Redirect": "/login"})
    if request.method == "GET" and "text/html" in request.headers.get("accept", ""):
        query = request.url.query
        target = request.url.path + (f"?{query}" if query else "")
        return RedirectResponse(f"/login?next={quote(target, safe='/')}", status_code=303)
    accounts = request.app.state.door.accounts
    kind = "a key of its own" if accounts else "its token"
    error, message = (
        "unauthorized",
        (f"this server asks for {kind}: send Authorization: Bearer TOKEN (agents read HOLDFAST_TOKEN)"),
    )
    if "authorization" in request.headers:
        error = "wrong_token"
        message = (
            "this key does not work here, or no more: `holdfast token list` on the server's machine says which do"
            if accounts
            else "this is not the token of this server: compare HOLDFAST_TOKEN here and where it was started"
        )
    return JSONResponse({"error": error, "message": message}, 401, {"WWW-Authenticate": "Bearer"})


def ask_to_sign_in_again(request: Request) -> Response:
    """For somebody who may, and whose sign-in is too long ago for what they ask; afterwards they ask again."""
    shown = request.headers.get("hx-current-url") or request.headers.get("referer") or "/"
    address = f"/login?again=true&next={quote(_path_of(shown), safe='/')}"
    if request.headers.get("hx-request") == "true":
        return Response(status_code=401, headers={"HX-Redirect": address})
    if "text/html" in request.headers.get("accept", ""):
        return RedirectResponse(address, 303)
    minutes = f"{policy.FRESH_SECONDS / 60:.0f} minutes"
    message = f"this asks for a sign-in of the last {minutes}: sign in again, or use a key"
    return JSONResponse({"error": "sign_in_again", "message": message}, 401)


def _path_of(address: str) -> str:
    try:
        return urlsplit(address).path
    except ValueError:
        return "/"


def _too_little(asker: Principal) -> str:
    if asker.kind == "agent":
        held = ", ".join(sorted(asker.scopes)) or "nothing"
        return f"this key may {held} and no more: ask for one with the scope that this needs"
    return "you may look at this and not change it: an admin of the project can give you the role that it takes"
