"""Middleware that authenticates each request and refuses it if the access rules does not allow it."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import math
from collections.abc import Awaitable, Callable
from functools import lru_cache
from urllib.parse import quote, urlsplit

from sqlalchemy.exc import SQLAlchemyError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast_server.accounts.auth_backends import Credentials
from holdfast_server.core import access
from holdfast_server.core.errors import TooManySignInAttempts, UnknownJob, UnknownProject
from holdfast_server.core.principal import ANONYMOUS, OPERATOR, Principal, current_principal
from holdfast_server.db import DatabaseBusy, DatabaseClosed, DatabaseUnavailable
from holdfast_server.http.services import services_of

COOKIE, DEVICE_COOKIE = "holdfast_session", "holdfast_device"
HOST_PREFIX = "__Host-"
"""Prefix of our cookies over HTTPS: browsers then accept them from this host only."""
RECHECK_SECONDS = 2.0
"""Time between two checks of the client of a stream or a long poll: losing the right to it ends it."""
UNKNOWN = "unknown"
ADDRESSES_KEPT = 4096
"""Addresses of clients whose form is remembered: parsing one costs more than a lookup, and agents report often."""
WARNING_SECONDS = 60.0
"""Shortest time between two warnings: thousands of clients may be waiting."""

logger = logging.getLogger(__name__)

UNREACHABLE = (DatabaseClosed, DatabaseUnavailable, SQLAlchemyError)
"""Errors of a database that cannot be read."""

Refuse = Callable[[Request, Exception], Awaitable[Response]]
RequestCheck = Callable[[Scope], Response | None]


class AuthMiddleware:
    """Authenticates the client, applies the request checks, and lets through what the policy allows.

    Args:
        app: the application behind it.
        refuse: makes the answer to a refused request from an exception.
        checks: refusals that do not depend on the policy, such as an unknown host name.
    """

    def __init__(self, app: ASGIApp, *, refuse: Refuse, checks: tuple[RequestCheck, ...] = ()) -> None:
        self.app = app
        self.refuse = refuse
        self.checks = checks
        self._warned_at = -math.inf

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] == "http":  # a websocket that gets no answer is refused
            await self._handle(scope, receive, send)

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        match = access.match_of(scope)
        try:
            asker = scope["state"]["principal"] = await self._authenticated(scope, match)
        except (*UNREACHABLE, DatabaseBusy, TooManySignInAttempts) as error:
            await (await self.refuse(Request(scope), error))(scope, receive, send)
            return
        token = current_principal.set(asker)  # before a refusal, which may be a page
        try:
            refused = next(filter(None, (check(scope) for check in self.checks)), None)
            if refused is None:
                refused = await self._refused(scope, match, asker)
            if refused is not None:
                await refused(scope, receive, send)
            elif match is not None and match.rule.long_lived and asker is not OPERATOR:
                await self._answer_while_allowed(match, scope, receive, send)
            else:
                await self.app(scope, receive, send)
        finally:
            current_principal.reset(token)

    async def _authenticated(self, scope: Scope, match: access.RouteMatch | None) -> Principal:
        services = services_of(scope["app"])
        if services.auth.has_accounts and match is not None and match.rule.audience == "public":
            return ANONYMOUS  # saves a database query: public routes do not depend on the client
        return await services.auth.authenticate(credentials_of(scope), now=services.clock())

    async def _refused(self, scope: Scope, match: access.RouteMatch | None, asker: Principal) -> Response | None:
        request = Request(scope)
        if match is None:
            return ask_to_sign_in(request) if asker is ANONYMOUS else None  # the router refuses it
        try:
            decision = await self._decision(scope, match, asker)
        except UNREACHABLE as error:
            return await self.refuse(request, error)
        match decision:
            case "allow":
                expired = access.needs_password(match, asker, now=services_of(scope["app"]).clock())
                return ask_for_password(request) if expired else None
            case "sign in":
                return ask_to_sign_in(request)
            case "hide":
                return await self.refuse(request, _unknown(match))
            case "forbid":
                return await self.refuse(request, HTTPException(403, _missing_rights(asker)))

    async def _decision(self, scope: Scope, match: access.RouteMatch, asker: Principal) -> access.AccessDecision:
        if match.job is None or asker.kind == "anonymous" or (asker.admin and asker.kind == "person"):
            return access.decide(match, asker, None)
        project = await services_of(scope["app"]).job_projects.project_of(match.job)
        return access.decide(match, asker, project)

    async def _answer_while_allowed(
        self, match: access.RouteMatch, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Answer, and end the answer once the client may no longer have it."""
        started = False

        async def send_on(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        answering = asyncio.ensure_future(self.app(scope, receive, send_on))
        watching = asyncio.create_task(self._until_refused(match, scope))
        try:
            await asyncio.wait([answering, watching], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (watching, answering):
                if not task.done():
                    task.cancel()
            results = await asyncio.gather(answering, watching, return_exceptions=True)
        if watching.done() and not watching.cancelled() and not started:
            await ask_to_sign_in(Request(scope))(scope, receive, send)
        elif isinstance(results[0], Exception):
            raise results[0]

    async def _until_refused(self, match: access.RouteMatch, scope: Scope) -> None:
        services, known = services_of(scope["app"]), scope["state"]["principal"]
        while True:
            await asyncio.sleep(RECHECK_SECONDS)
            try:
                asker = await services.auth.authenticate(credentials_of(scope), now=services.clock())
                # The rights of a key never change, and thousands of agents wait at once: skip the decision.
                unchanged = asker == known and asker.kind == "key"
                if not unchanged and await self._decision(scope, match, asker) != "allow":
                    return
            except UNREACHABLE as error:
                self._warn(error)

    def _warn(self, error: Exception) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._warned_at >= WARNING_SECONDS:
            self._warned_at = now
            logger.warning("could not check the rights of clients with open streams: %s", error)


def credentials_of(scope: Scope) -> Credentials:
    headers = Headers(scope=scope)
    scheme, _, token = headers.get("authorization", "").partition(" ")
    bearer = token.strip() if scheme.lower() == "bearer" else ("" if "authorization" in headers else None)
    return Credentials(bearer, cookie_of(scope, COOKIE), address_of(scope))


def address_of(scope: Scope) -> str:
    """Return the client's address, which a trusted proxy sends in `X-Forwarded-For`, or `unknown`.

    Any other text would evade the rate limits by address, and would end up in the audit log.
    """
    client = scope.get("client")
    return _address_of(client[0]) if client else UNKNOWN


@lru_cache(ADDRESSES_KEPT)
def _address_of(text: str) -> str:
    try:
        # an IPv6 zone (fe80::1%eth0) may be any text
        return str(ipaddress.ip_address(text.partition("%")[0]))
    except ValueError:
        return UNKNOWN


def over_https(scope: Scope) -> bool:
    """Return whether browsers reach this server over HTTPS, by the connection or by the public address."""
    address = services_of(scope["app"]).settings.address or ""
    return scope["scheme"] == "https" or address.startswith("https://")


def cookie_name(scope: Scope, name: str) -> str:
    return HOST_PREFIX + name if over_https(scope) else name


def cookie_of(scope: Scope, name: str) -> str | None:
    """Return our cookie's value. Over HTTPS only the prefixed one counts: a sibling domain can set the plain
    one."""
    if not any(header == b"cookie" for header, _ in scope["headers"]):
        return None
    return Request(scope).cookies.get(cookie_name(scope, name))


def ask_to_sign_in(request: Request) -> Response:
    """Redirect pages and forms to the sign-in page, and from there back; explain to programs what to send.

    A fragment is refused without a redirect: the page that asked for it stays, with what was typed.
    """
    if request.headers.get("hx-request") == "true":
        return Response(status_code=401)
    if "text/html" in request.headers.get("accept", ""):
        target = _target_of(str(request.url)) if request.method == "GET" else _page_of(request)
        return RedirectResponse(f"/login?next={quote(target, safe='/')}", status_code=303)
    accounts = services_of(request.app).auth.has_accounts
    if "authorization" not in request.headers:
        kind = "a key" if accounts else "the shared secret"
        error = "unauthorized"
        message = f"this server requires {kind}: send Authorization: Bearer TOKEN (agents read HOLDFAST_TOKEN)"
    else:
        error = "wrong_token"
        message = (
            "this key is unknown, expired or revoked: `holdfast token list` on the server lists the valid ones"
            if accounts
            else "wrong shared secret: HOLDFAST_TOKEN must have the same value here and on the server"
        )
    return JSONResponse({"error": error, "message": message}, 401, {"WWW-Authenticate": "Bearer"})


def ask_for_password(request: Request) -> Response:
    """Ask a person, who may do this, to enter the password again because the last time is too long ago."""
    address = f"/login?again=true&next={quote(_page_of(request), safe='/')}"
    if request.headers.get("hx-request") == "true":
        return Response(status_code=401, headers={"HX-Redirect": address})
    if "text/html" in request.headers.get("accept", ""):
        return RedirectResponse(address, 303)
    minutes = f"{access.RECENT_PASSWORD_SECONDS / 60:.0f} minutes"
    message = f"this requires a sign-in within the last {minutes}: sign in again, or use a key"
    return JSONResponse({"error": "sign_in_again", "message": message}, 401)


def _page_of(request: Request) -> str:
    """Return the path and query of the page that sent a request."""
    return _target_of(request.headers.get("hx-current-url") or request.headers.get("referer") or "/")


def _target_of(address: str) -> str:
    try:
        path, query = urlsplit(address)[2:4]
    except ValueError:
        return "/"
    return path + (f"?{query}" if query else "")


def _missing_rights(asker: Principal) -> str:
    if asker.kind == "key":
        held = ", ".join(sorted(asker.scopes)) or "none"
        return f"the scopes of this key ({held}) do not allow this: use a key with the required scope"
    return "your role does not allow this: an admin of the project can give you a higher one"


def _unknown(match: access.RouteMatch) -> Exception:
    """Return the answer for objects that do not exist, for objects hidden from the client."""
    if match.job is not None:
        return UnknownJob(match.job)
    return HTTPException(404) if match.project is None else UnknownProject(match.project)
