"""Who may talk to the server: hosts, origins, slow bodies, and what browsers are told."""

from __future__ import annotations

import asyncio
import ipaddress
import re
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast_server.accounts.auth_middleware import COOKIE, cookie_of, over_https
from holdfast_server.core.principal import NOBODY
from holdfast_server.core.request_id import HEADER, request_id
from holdfast_server.core.settings import ServerSettings

_Handler = Callable[[Request, Exception], Awaitable[Response]]

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
STRICT_TRANSPORT = "max-age=31536000"
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
BODY_SECONDS = 20.0
"""In which the body of a request has to arrive: a connection that trickles holds memory and a place."""


PROXY_HEADERS = ("forwarded", "via", "x-real-ip")
"""With every `X-Forwarded-` header, what proxies add to the requests that they forward."""
_HOST = re.compile(r"(\[[^\[\]]*\]|[^\[\]:]*)(:\d*)?")


class HostMiddleware:
    """Refuses names that are not ours, so that a page elsewhere cannot rebind its own name to this server.

    An address written in digits cannot be rebound. Nor does a browser ever send a key to a name that it was lured
    to, so agents may use whatever name they reach the server by.

    A server without authentication also refuses what a proxy forwarded: it trusts its own machine, and the proxy's
    clients are elsewhere.
    """

    def __init__(self, app: ASGIApp, *, settings: ServerSettings) -> None:
        self.app = app
        own = {"localhost", settings.host.lower(), *(name.lower() for name in settings.allowed_hosts)}
        self.names = own | ({_hostname(urlsplit(settings.address).netloc)} if settings.address else set())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        sign = None if scope["app"].state.door.asks else _sign_of_a_proxy(scope, headers)
        if sign is not None:
            message = (
                f"a proxy forwarded this request ({sign}), and this server authenticates nobody: start it with "
                "--address and the public URL, so that people sign in and agents have keys, or with a shared "
                "secret in HOLDFAST_TOKEN (docs/deploying.md, Behind a proxy)"
            )
            await _refusal(403, "behind_a_proxy", message)(scope, receive, send)
        elif self._ours(host) or _shows_a_key(scope, headers):
            await self.app(scope, receive, send)
        else:
            message = (
                f"this server does not answer to the name {host!r}: use its address, or start it with "
                f"--allow-host {_hostname(host) or 'NAME'} (HOLDFAST_HOSTS)"
            )
            await _refusal(421, "unknown_host", message)(scope, receive, send)

    def _ours(self, host: str) -> bool:
        name = _hostname(host)
        if name in self.names:
            return True
        try:
            ipaddress.IPv6Address(name[1:-1]) if name.startswith("[") else ipaddress.IPv4Address(name)
        except ValueError:
            return False
        return True


class CrossOriginMiddleware:
    """Refuses what other sites make a browser send: Go's `http.CrossOriginProtection`, instead of CSRF tokens.

    Browsers say where a request comes from in `Sec-Fetch-Site`, and on plain HTTP to another machine, where
    they leave that out, in `Origin`. A request with neither is not a browser's, unless it brings a session: that
    one is refused, whatever browser it is that keeps quiet.
    """

    def __init__(self, app: ASGIApp, *, settings: ServerSettings) -> None:
        self.app = app
        self.address = urlsplit(settings.address).netloc.lower() if settings.address else ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in SAFE_METHODS or self._ours(scope):
            await self.app(scope, receive, send)
            return
        message = "this request came from another site: open the dashboard itself and try there"
        await _refusal(403, "cross_origin", message)(scope, receive, send)

    def _ours(self, scope: Scope) -> bool:
        headers = Headers(scope=scope)
        site, origin = headers.get("sec-fetch-site"), headers.get("origin")
        if site is not None:
            return site in ("same-origin", "none")
        if origin is None:
            return cookie_of(scope, COOKIE) is None
        try:
            # The scheme is left out: behind a proxy that ends TLS, we see another one than the browser does.
            netloc = urlsplit(origin).netloc.lower()
        except ValueError:
            return False
        return netloc != "" and netloc in (headers.get("host", "").lower(), self.address)


class BodyDeadlineMiddleware:
    """Gives a request's body a while to arrive, and no longer."""

    def __init__(self, app: ASGIApp, *, seconds: float = BODY_SECONDS) -> None:
        self.app = app
        self.seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        deadline = asyncio.get_running_loop().time() + self.seconds
        whole = False

        async def receive_in_time() -> Message:
            nonlocal whole
            if (
                whole
            ):  # what comes now is that the client has gone, and a stream waits for that as long as it lasts
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, f"the request's body took longer than {self.seconds:g} s") from None
            whole = not message.get("more_body", False)
            return message

        await self.app(scope, receive_in_time, send)


class HeadersMiddleware:
    """What every answer tells the browser to refuse on our behalf."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(_protection(scope))
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        await self.app(scope, receive, send_with_headers if scope["type"] == "http" else send)


def protected(handler: _Handler) -> _Handler:
    """For the answer to an error that nobody caught: it is written outside all middleware."""

    async def answer(request: Request, error: Exception) -> Response:
        response = await handler(request, error)
        response.headers.update({**_protection(request.scope), "Cache-Control": "no-store", HEADER: request_id()})
        return response

    return answer


def _protection(scope: Scope) -> dict[str, str]:
    return PROTECTION | ({"Strict-Transport-Security": STRICT_TRANSPORT} if over_https(scope) else {})


def _hostname(host: str) -> str:
    """The name in a Host header, without its port; empty for what is no name and port."""
    found = _HOST.fullmatch(host)
    return "" if found is None else found[1].lower()


def _sign_of_a_proxy(scope: Scope, headers: Headers) -> str | None:
    """What shows that a request was forwarded; None also for a proxy that shows nothing.

    nginx adds no header unless configured to. Before 1.29.7 it speaks HTTP/1.0 by default, and HTTP/1.1 since.
    """
    if scope["http_version"] == "1.0":
        return "HTTP/1.0"
    names = (name for name in headers if name in PROXY_HEADERS or name.startswith("x-forwarded-"))
    return next(names, None)


def _shows_a_key(scope: Scope, headers: Headers) -> bool:
    """On a server that asks for one; any other would take any word for it."""
    asks = scope["app"].state.door.asks
    return asks and "authorization" in headers and scope["state"]["principal"] is not NOBODY


def _refusal(status: int, error: str, message: str) -> Response:
    return JSONResponse({"error": error, "message": message}, status_code=status)
