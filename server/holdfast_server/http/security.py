"""Protection of the server: host names, origins, size and time of request bodies, and security headers."""

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

from holdfast_server.core.access import HEALTH_CHECKS, MAX_FORM_BYTES, match_of
from holdfast_server.core.principal import ANONYMOUS
from holdfast_server.core.request_id import HEADER, request_id
from holdfast_server.core.settings import ServerSettings
from holdfast_server.http.auth_middleware import COOKIE, cookie_of, over_https
from holdfast_server.http.services import services_of

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
_PROTECTION = [(name.lower().encode(), value.encode()) for name, value in PROTECTION.items()]
_PROTECTED = {name for name, _ in _PROTECTION}
STRICT_TRANSPORT = "max-age=31536000"
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
BODY_SECONDS = 20.0
"""Time limit for the body of a request: a slow connection holds memory."""

PROXY_HEADERS = ("forwarded", "via", "x-real-ip")
"""Headers that proxies add, in addition to every `X-Forwarded-` header."""
_HOST = re.compile(r"(\[[^\[\]]*\]|[^\[\]:]*)(:\d*)?")


class HostCheck:
    """Refuses unknown host names, so that a page elsewhere cannot rebind its own name to this server.

    An IP address cannot be rebound. A browser never sends a key to a name that an attacker controls, so agents may
    use any name.

    A server without authentication also refuses forwarded requests: it trusts its own machine, and the clients of
    a proxy are on other machines. Health checks are exempt, and may leave out the host name, as HTTP/1.0 allows.
    """

    def __init__(self, settings: ServerSettings) -> None:
        own = {"localhost", settings.host.lower(), *(name.lower() for name in settings.allowed_hosts)}
        self.names = own | ({_hostname(urlsplit(settings.address).netloc)} if settings.address else set())

    def __call__(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        is_health_check = scope["path"] in HEALTH_CHECKS
        exempt = is_health_check or services_of(scope["app"]).auth.requires_authentication
        sign = None if exempt else _sign_of_a_proxy(scope, headers)
        if sign is not None:
            message = (
                f"this server has no authentication and refuses requests from a proxy ({sign}): start it "
                "with --address and the public URL to enable accounts, or with a shared secret in HOLDFAST_TOKEN "
                "(docs/deploying.md, Behind a proxy)"
            )
            return _refusal(403, "behind_a_proxy", message)
        if self._is_ours(host) or _has_valid_key(scope, headers) or (is_health_check and not host):
            return None
        message = (
            f"unknown host name {host!r}: use the server's IP address, or start it with --allow-host "
            f"{_hostname(host) or 'NAME'} (HOLDFAST_HOSTS)"
        )
        return _refusal(421, "unknown_host", message)

    def _is_ours(self, host: str) -> bool:
        name = _hostname(host)
        if name in self.names:
            return True
        try:
            ipaddress.IPv6Address(name[1:-1]) if name.startswith("[") else ipaddress.IPv4Address(name)
        except ValueError:
            return False
        return True


class OriginCheck:
    """Refuses writes that other sites make a browser send: Go's `http.CrossOriginProtection`, instead of CSRF
    tokens.

    Browsers send the origin of a request in `Sec-Fetch-Site`, and on plain HTTP to another machine, where they
    leave that out, in `Origin`. A request with neither is not a browser's; it is refused if it has a session
    cookie.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self.address = urlsplit(settings.address).netloc.lower() if settings.address else ""

    def __call__(self, scope: Scope) -> Response | None:
        if scope["method"] in SAFE_METHODS or self._is_same_origin(scope):
            return None
        message = "cross-origin request refused: open the dashboard and try there"
        return _refusal(403, "cross_origin", message)

    def _is_same_origin(self, scope: Scope) -> bool:
        headers = Headers(scope=scope)
        site, origin = headers.get("sec-fetch-site"), headers.get("origin")
        if site is not None:
            return site in ("same-origin", "none")
        if origin is None:
            return cookie_of(scope, COOKIE) is None
        try:
            # Compare without the scheme: behind a proxy that ends TLS, it differs from what the browser sees.
            netloc = urlsplit(origin).netloc.lower()
        except ValueError:
            return False
        return netloc != "" and netloc in (headers.get("host", "").lower(), self.address)


class BodyMiddleware:
    """Limits the size of a request's body, as its endpoint declares, and the time in which it must arrive.

    No endpoint reads the body of a GET. A stream receives only to notice that its client disconnected, and cannot
    refuse a body once its answer has begun.
    """

    def __init__(self, app: ASGIApp, *, seconds: float = BODY_SECONDS) -> None:
        self.app = app
        self.seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in SAFE_METHODS:
            await self.app(scope, receive, send)
            return
        match = match_of(scope)
        most = MAX_FORM_BYTES if match is None else match.max_body_bytes
        deadline = asyncio.get_running_loop().time() + self.seconds
        received, whole = 0, False

        async def receive_within_limits() -> Message:
            nonlocal received, whole
            if whole:  # a stream waits for the client to disconnect, without a limit
                return await receive()
            if not received and _declared_bytes(scope) > most:
                raise HTTPException(413)
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(
                    408, f"the body of the request did not arrive within {self.seconds:g} s"
                ) from None
            if message["type"] == "http.disconnect":
                raise HTTPException(400, "the client disconnected before it sent the whole body")
            received += len(message.get("body", b""))
            if received > most:
                raise HTTPException(413)
            whole = not message.get("more_body", False)
            return message

        await self.app(scope, receive_within_limits, send)


def protected(handler: _Handler) -> _Handler:
    """Add headers to the answer to an unhandled error, which is sent outside all middleware."""

    async def answer(request: Request, error: Exception) -> Response:
        response = await handler(request, error)
        protect(request.scope, response.headers)
        response.headers[HEADER] = request_id()
        return response

    return answer


def protect(scope: Scope, headers: MutableHeaders) -> None:
    """Add the headers that every answer has."""
    present = {name for name, _ in headers.raw}
    if present.isdisjoint(_PROTECTED):
        headers.raw.extend(_PROTECTION)  # `update` searches all headers for each of these
    else:
        headers.update(PROTECTION)
    if over_https(scope):
        headers["Strict-Transport-Security"] = STRICT_TRANSPORT
    if b"cache-control" not in present:
        headers.append("Cache-Control", "no-store")


def _hostname(host: str) -> str:
    """Return the name in a Host header without the port; empty if the header is malformed."""
    found = _HOST.fullmatch(host)
    return "" if found is None else found[1].lower()


def _sign_of_a_proxy(scope: Scope, headers: Headers) -> str | None:
    """Return what reveals a proxy; `None` also for a proxy that reveals nothing.

    nginx adds no header unless configured to. Before 1.29.7 it speaks HTTP/1.0 by default, and HTTP/1.1 since.
    """
    if scope["http_version"] == "1.0":
        return "HTTP/1.0"
    names = (name for name in headers if name in PROXY_HEADERS or name.startswith("x-forwarded-"))
    return next(names, None)


def _has_valid_key(scope: Scope, headers: Headers) -> bool:
    authenticated = services_of(scope["app"]).auth.requires_authentication and "authorization" in headers
    return authenticated and scope["state"]["principal"] is not ANONYMOUS


def _declared_bytes(scope: Scope) -> int:
    """Return the declared length of the body; 0 if none is declared."""
    declared = Headers(scope=scope).get("content-length", "")
    return int(declared) if declared.isdecimal() else 0


def _refusal(status: int, error: str, message: str) -> Response:
    return JSONResponse({"error": error, "message": message}, status_code=status)
