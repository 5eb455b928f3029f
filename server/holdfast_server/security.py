"""Who may talk to the server: hosts, origins, the shared secret, and what browsers are told."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import time
from collections.abc import Awaitable, Callable
from http.cookies import CookieError, SimpleCookie
from typing import Literal, TypedDict
from urllib.parse import quote, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast_server.settings import ServerSettings

_Handler = Callable[[Request, Exception], Awaitable[Response]]

SESSION_COOKIE = "holdfast_session"
SESSION_SECONDS = 30 * 24 * 3600
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
PROTECTION = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
OPEN_PATHS = ("/healthz", "/readyz", "/login", "/static/")
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")


class Cookie(TypedDict):
    """Arguments of Starlette's `Response.set_cookie`."""

    key: str
    value: str
    max_age: int
    path: str
    secure: bool
    httponly: bool
    samesite: Literal["lax", "strict", "none"]


def check_token(settings: ServerSettings, token: str) -> bool:
    """Whether this is the shared secret; takes as long for a near miss as for a far one."""
    return settings.token is not None and hmac.compare_digest(token.strip().encode(), settings.token.encode())


def session_cookie(settings: ServerSettings, *, secure: bool = False, now: float | None = None) -> Cookie:
    """The cookie of somebody who has shown the secret: `response.set_cookie(**session_cookie(settings))`.

    It is signed with the secret, so that a new secret ends every session. `secure` belongs to HTTPS.
    """
    expires = int((time.time() if now is None else now) + SESSION_SECONDS)
    return Cookie(
        key=SESSION_COOKIE,
        value=f"{expires}.{_signature(settings, expires)}",
        max_age=SESSION_SECONDS,
        path="/",
        secure=secure,
        httponly=True,
        samesite="lax",
    )


def valid_session(settings: ServerSettings, value: str, *, now: float) -> bool:
    expires, _, signature = value.partition(".")
    if not (expires.isascii() and expires.isdigit()) or len(expires) > 12 or int(expires) < now:
        return False
    return hmac.compare_digest(signature.encode(), _signature(settings, int(expires)).encode())


def _signature(settings: ServerSettings, expires: int) -> str:
    assert settings.token is not None
    return hmac.new(settings.token.encode(), f"session {expires}".encode(), hashlib.sha256).hexdigest()


class HostMiddleware:
    """Refuses names that are not ours, so that a page elsewhere cannot rebind its own name to this server.

    An address written in digits cannot be rebound. Nor does a browser ever send our bearer token to a
    name that it was lured to, so agents may use whatever name they reach the server by.
    """

    def __init__(self, app: ASGIApp, *, settings: ServerSettings) -> None:
        self.app = app
        self.settings = settings
        self.names = {"localhost", settings.host.lower(), *(name.lower() for name in settings.allowed_hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if self._ours(host) or _bearer_ok(self.settings, headers):
            await self.app(scope, receive, send)
            return
        message = (
            f"this server does not answer to the name {_hostname(host)!r}: use its address, or start it with "
            f"--allow-host {_hostname(host) or 'NAME'} (HOLDFAST_HOSTS)"
        )
        await _refusal(421, "unknown_host", message)(scope, receive, send)

    def _ours(self, host: str) -> bool:
        name = _hostname(host)
        if name in self.names:
            return True
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return False
        return True


class CrossOriginMiddleware:
    """Refuses what other sites make a browser send: Go's `http.CrossOriginProtection`, instead of CSRF tokens.

    Browsers say where a request comes from in `Sec-Fetch-Site`, and on plain HTTP to another machine, where
    they leave that out, in `Origin`. A request with neither is not a browser's.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in SAFE_METHODS or _same_origin(Headers(scope=scope)):
            await self.app(scope, receive, send)
            return
        message = "this request came from another site: open the dashboard itself and try there"
        await _refusal(403, "cross_origin", message)(scope, receive, send)


class LoginMiddleware:
    """Asks for the shared secret, where one is set: a bearer token, or the cookie that /login gives for it."""

    def __init__(self, app: ASGIApp, *, settings: ServerSettings) -> None:
        self.app = app
        self.settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self.settings.token is None or self._allowed(scope):
            await self.app(scope, receive, send)
            return
        await self._ask(scope)(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        path = scope["path"]
        if any(path == entry or (entry.endswith("/") and path.startswith(entry)) for entry in OPEN_PATHS):
            return True
        headers = Headers(scope=scope)
        if _bearer_ok(self.settings, headers):
            return True
        value = _cookie(headers.get("cookie", ""))
        return value is not None and valid_session(self.settings, value, now=time.time())

    def _ask(self, scope: Scope) -> Response:
        headers = Headers(scope=scope)
        if headers.get("hx-request") == "true":
            return Response(status_code=401, headers={"HX-Redirect": "/login"})
        if scope["method"] == "GET" and "text/html" in headers.get("accept", ""):
            query = scope["query_string"].decode("latin-1")
            target = scope["path"] + (f"?{query}" if query else "")
            return RedirectResponse(f"/login?next={quote(target, safe='/')}", status_code=303)
        error = "unauthorized"
        message = "this server asks for its token: send Authorization: Bearer TOKEN (agents read HOLDFAST_TOKEN)"
        if "authorization" in headers:
            error = "wrong_token"
            message = "this is not the token of this server: compare HOLDFAST_TOKEN here and where it was started"
        return _refusal(401, error, message, {"WWW-Authenticate": "Bearer"})


class HeadersMiddleware:
    """What every answer tells the browser to refuse on our behalf."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(PROTECTION)
                if not scope["path"].startswith("/static/"):
                    headers.setdefault("Cache-Control", "no-store")
            await send(message)

        await self.app(scope, receive, send_with_headers if scope["type"] == "http" else send)


def protected(handler: _Handler) -> _Handler:
    """For the answer to an error that nobody caught: it is written outside all middleware."""

    async def answer(request: Request, error: Exception) -> Response:
        response = await handler(request, error)
        response.headers.update({**PROTECTION, "Cache-Control": "no-store"})
        return response

    return answer


def _hostname(host: str) -> str:
    if host.startswith("["):
        return host.partition("]")[0].lower() + "]"
    return host.partition(":")[0].lower()


def _same_origin(headers: Headers) -> bool:
    site = headers.get("sec-fetch-site")
    if site is not None:
        return site in ("same-origin", "none")
    origin = headers.get("origin")
    if origin is None:
        return True
    try:
        # The scheme is left out: behind a proxy that ends TLS, we see another one than the browser does.
        return urlsplit(origin).netloc.lower() == headers.get("host", "").lower() != ""
    except ValueError:
        return False


def _bearer_ok(settings: ServerSettings, headers: Headers) -> bool:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return scheme.lower() == "bearer" and check_token(settings, token)


def _cookie(header: str) -> str | None:
    try:
        morsel = SimpleCookie(header).get(SESSION_COOKIE)
    except CookieError:
        return None
    return morsel.value if morsel else None


def _refusal(status: int, error: str, message: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": error, "message": message}, status_code=status, headers=headers)
