"""Webhook requests that cannot reach the server's own network (protection against SSRF).

A user who sets a URL could otherwise make this server send requests to its own network, such as to a database or a
cloud's metadata service. Requests go to public addresses only, each name is resolved once, and nothing of the
answer but its status is used.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from holdfast_server.core.alert_settings import AlertSettings, origin_of

TIMEOUT_SECONDS = 5.0
"""Time limit for resolving, connecting, sending, and the first line of the answer."""
MAX_BYTES = 65536
"""Limit of the body, and of the line that is read."""
MAX_URL = 2000

_NAME = re.compile(r"(?=.{4,253}$)([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\.)+(?!\d+$)[a-z0-9-]{2,63}", re.IGNORECASE)
"""A fully qualified name whose last label is not a number: no short name, and no disguised address."""
_PATH = re.compile(r"[!-~]*")
_STATUS = re.compile(rb"HTTP/1\.[01] ([1-5]\d\d)[ \r\n]")
_UNICAST_V6 = ipaddress.IPv6Network("2000::/3")
"""All public IPv6 addresses. Translated, mapped and compatible IPv4 addresses lie outside."""
_NOT_PUBLIC = tuple(
    ipaddress.ip_network(network)
    for network in (
        # special-purpose addresses in IANA's registries that some versions of `ipaddress` call global
        "192.0.0.0/24",  # IETF protocol assignments; a cloud's metadata among them
        "192.31.196.0/24",  # AS112
        "192.52.193.0/24",  # automatic multicast tunneling
        "192.88.99.0/24",  # 6to4 relays
        "192.175.48.0/24",  # AS112
        "2001::/23",  # IETF protocol assignments: Teredo, benchmarks, ORCHID, drone tags
        "2002::/16",  # IPv4 inside 6to4
        "2620:4f:8000::/48",  # AS112
        "3fff::/20",  # documentation
        # in no registry
        "168.63.129.16/32",  # Azure's agent
    )
)
Lookup = Callable[[str, int], Awaitable[list[str]]]


class UrlBlocked(ValueError):
    """The server does not send requests to this URL."""


class DeliveryFailed(Exception):
    """No answer, or one with another status than 2xx. The message reveals nothing else of the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookTarget:
    """A checked URL."""

    scheme: str
    host: str
    port: int
    path: str
    allowed: bool
    """Whether the server's configuration exempts it from the checks."""


def parse(url: str, settings: AlertSettings) -> WebhookTarget:
    """Check a URL. Raises UrlBlocked."""
    if len(url) > MAX_URL or not _PATH.fullmatch(url) or "\\" in url:
        raise UrlBlocked(f"the URL of a webhook has at most {MAX_URL} ASCII characters and no spaces")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        raise UrlBlocked("invalid URL: write it like https://hooks.example.org/path") from None
    if parts.username is not None or parts.password is not None or "@" in parts.netloc:
        raise UrlBlocked(
            "the URL of a webhook must not contain a user name: put a secret into its path, or check the signature"
        )
    if parts.scheme not in ("https", "http") or not host:
        raise UrlBlocked("the URL of a webhook must begin with https:// and name a host")
    default_port = 443 if parts.scheme == "https" else 80
    allowed = origin_of(parts.scheme, host, port) in settings.webhook_hosts
    if not allowed:
        _require_public_form(parts.scheme, host, port)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return WebhookTarget(scheme=parts.scheme, host=host, port=port or default_port, path=path, allowed=allowed)


def _require_public_form(scheme: str, host: str, port: int | None) -> None:
    remedy = "the server's administrator can allow it in HOLDFAST_WEBHOOK_HOSTS"
    if scheme != "https" or port not in (None, 443):
        raise UrlBlocked(f"webhooks must use https on port 443; {remedy}")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        if not _NAME.fullmatch(host):
            raise UrlBlocked(f"{host!r} is not a full host name like hooks.example.org; {remedy}") from None
        return
    if not is_public(address):
        raise UrlBlocked(f"{host} is not a public address; {remedy}")


def is_public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Return False for addresses of this machine or a private network, in any notation."""
    if isinstance(address, ipaddress.IPv6Address) and address not in _UNICAST_V6:
        return False
    if not address.is_global or address.is_multicast or address.is_reserved or address.is_unspecified:
        return False
    return not any(address.version == net.version and address in net for net in _NOT_PUBLIC)


async def look_up(host: str, port: int) -> list[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


async def address_of(target: WebhookTarget, lookup: Lookup = look_up) -> str:
    """Resolve the name once and return the address to connect to. Raises UrlBlocked, DeliveryFailed."""
    try:
        found = await lookup(target.host, target.port)
    except OSError as error:
        raise DeliveryFailed(f"{target.host} has no IP address: {error.strerror or error}") from None
    if not found:
        raise DeliveryFailed(f"{target.host} has no IP address")
    # All addresses must be public: a private one among them indicates an attack.
    if not target.allowed and not all(is_public(ipaddress.ip_address(each.partition("%")[0])) for each in found):
        raise UrlBlocked(f"{target.host} resolves to an address that is not public")
    return found[0]


async def post(
    url: str, body: bytes, headers: Mapping[str, str], settings: AlertSettings, *, lookup: Lookup = look_up
) -> None:
    """Send a POST request that must be answered with a 2xx status. Redirects are not followed.

    Raises:
        UrlBlocked: sending it again is of no use.
        DeliveryFailed: sending it again may succeed.
    """
    if len(body) > MAX_BYTES:
        raise UrlBlocked(f"a message of {len(body)} bytes exceeds the limit of {MAX_BYTES}")
    target = parse(url, settings)
    try:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            status = await _exchange(target, await address_of(target, lookup), body, headers)
    except TimeoutError:
        raise DeliveryFailed(f"{target.host} did not answer within {TIMEOUT_SECONDS:g} s") from None
    except (OSError, EOFError, ValueError) as error:  # ssl's errors are OSErrors; ValueError: a line without end
        if isinstance(error, UrlBlocked):
            raise
        raise DeliveryFailed(f"request to {target.host} failed: {type(error).__name__}") from None
    if not 200 <= status < 300:
        raise DeliveryFailed(f"{target.host} answered with status {status}")


async def _exchange(target: WebhookTarget, address: str, body: bytes, headers: Mapping[str, str]) -> int:
    secure = ssl.create_default_context() if target.scheme == "https" else None
    reader, writer = await asyncio.open_connection(
        address,
        target.port,
        ssl=secure,
        server_hostname=target.host if secure else None,
        limit=MAX_BYTES,
    )
    try:
        usual = target.port == (443 if secure else 80)
        host = f"[{target.host}]" if ":" in target.host else target.host
        lines = [
            f"POST {target.path} HTTP/1.1",
            f"Host: {host}" if usual else f"Host: {host}:{target.port}",
            *(f"{name}: {value}" for name, value in headers.items()),
            f"Content-Length: {len(body)}",
            "Connection: close",
        ]
        writer.write("\r\n".join([*lines, "", ""]).encode("ascii") + body)
        await writer.drain()
        found = _STATUS.match(await reader.readline())
    finally:
        writer.transport.abort()
    if found is None:
        raise EOFError
    return int(found[1])
