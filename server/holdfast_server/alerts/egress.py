"""How a request leaves the house: to public addresses only, looked up once, and nothing of the answer comes back.

Whoever names a URL could otherwise have this server ask its own network: a database beside it, a cloud's metadata.
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
"""For all of it: looking up, connecting, sending, and the first line of the answer."""
MOST_BYTES = 65536
"""Of what is sent, and of the line that is read."""
MAX_URL = 2000

_NAME = re.compile(r"(?=.{4,253}$)([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\.)+(?!\d+$)[a-z0-9-]{2,63}", re.IGNORECASE)
"""A name with a dot and a last part that is no number: neither a short name nor an address in disguise."""
_PATH = re.compile(r"[!-~]*")
_STATUS = re.compile(rb"HTTP/1\.[01] ([1-5]\d\d)[ \r\n]")
_UNICAST_V6 = ipaddress.IPv6Network("2000::/3")
"""All public IPv6 there is. Translated, mapped and compatible IPv4 addresses lie outside of it."""
_NOT_PUBLIC = tuple(
    ipaddress.ip_network(network)
    for network in (
        # what the `ipaddress` of some Python calls global, of IANA's registries of special-purpose addresses
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


class Blocked(ValueError):
    """This URL is not one that the server sends to; says why, and the way out."""


class NotTaken(Exception):
    """Nobody answered, or with another status than 2xx. What was answered is told to nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A URL that was looked at."""

    scheme: str
    host: str
    port: int
    path: str
    allowed: bool
    """By whoever runs the server, wherever it leads."""


def parse(url: str, settings: AlertSettings) -> Target:
    """Raises Blocked."""
    if len(url) > MAX_URL or not _PATH.fullmatch(url) or "\\" in url:
        raise Blocked(f"a webhook's URL has at most {MAX_URL} characters, all of them ASCII, and no blanks")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        raise Blocked("this is no URL: write one such as https://hooks.example.org/path") from None
    if parts.username is not None or parts.password is not None or "@" in parts.netloc:
        raise Blocked("a webhook's URL holds no user name: put a secret into its path, or check the signature")
    if parts.scheme not in ("https", "http") or not host:
        raise Blocked("a webhook's URL begins with https:// and names a host")
    usual = 443 if parts.scheme == "https" else 80
    allowed = origin_of(parts.scheme, host, port) in settings.webhook_hosts
    if not allowed:
        _require_public_form(parts.scheme, host, port, parts.netloc)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return Target(scheme=parts.scheme, host=host, port=port or usual, path=path, allowed=allowed)


def _require_public_form(scheme: str, host: str, port: int | None, netloc: str) -> None:
    way_out = "whoever runs the server can allow it in HOLDFAST_WEBHOOK_HOSTS"
    if scheme != "https" or port not in (None, 443):
        raise Blocked(f"webhooks go to https on port 443 only; {way_out}")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        if not _NAME.fullmatch(host):
            raise Blocked(f"{host!r} is not a host's full name, as in hooks.example.org; {way_out}") from None
        return
    if not is_public(address):
        raise Blocked(f"{host} is not a public address; {way_out}")


def is_public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Neither of this machine, nor of a private network, nor a way to write one of these."""
    if isinstance(address, ipaddress.IPv6Address) and address not in _UNICAST_V6:
        return False
    if not address.is_global or address.is_multicast or address.is_reserved or address.is_unspecified:
        return False
    return not any(address.version == net.version and address in net for net in _NOT_PUBLIC)


async def look_up(host: str, port: int) -> list[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


async def address_of(target: Target, lookup: Lookup = look_up) -> str:
    """Looked up once: this very address is connected to. Raises Blocked, and NotTaken where there is none."""
    try:
        found = await lookup(target.host, target.port)
    except OSError as error:
        raise NotTaken(f"{target.host} has no address: {error.strerror or error}") from None
    if not found:
        raise NotTaken(f"{target.host} has no address")
    # One bad apple is enough: an answer with a public and a private address is an attempt.
    if not target.allowed and not all(is_public(ipaddress.ip_address(each.partition("%")[0])) for each in found):
        raise Blocked(f"{target.host} leads to an address that is not public")
    return found[0]


async def post(
    url: str, body: bytes, headers: Mapping[str, str], settings: AlertSettings, *, lookup: Lookup = look_up
) -> None:
    """Returns once it was taken (2xx). Redirects are not followed, and the answer's body is not read.

    Raises:
        Blocked: sending it again is of no use.
        NotTaken: it may be taken later.
    """
    if len(body) > MOST_BYTES:
        raise Blocked(f"a message of {len(body)} bytes is longer than the {MOST_BYTES} that are sent")
    target = parse(url, settings)
    try:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            status = await _exchange(target, await address_of(target, lookup), body, headers)
    except TimeoutError:
        raise NotTaken(f"{target.host} did not answer within {TIMEOUT_SECONDS:g} s") from None
    except (OSError, EOFError, ValueError) as error:  # ssl's errors are OSErrors; ValueError: a line without end
        if isinstance(error, Blocked):
            raise
        raise NotTaken(f"{target.host} could not be talked to: {type(error).__name__}") from None
    if not 200 <= status < 300:
        raise NotTaken(f"{target.host} answered with status {status}")


async def _exchange(target: Target, address: str, body: bytes, headers: Mapping[str, str]) -> int:
    secure = ssl.create_default_context() if target.scheme == "https" else None
    reader, writer = await asyncio.open_connection(
        address,
        target.port,
        ssl=secure,
        server_hostname=target.host if secure else None,
        limit=MOST_BYTES,
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
