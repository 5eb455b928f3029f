"""Settings for mail and webhooks, from the environment because they hold secrets. Both are off by default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args
from urllib.parse import urlsplit

Security = Literal["starttls", "ssl", "none"]
SECURITIES: tuple[Security, ...] = get_args(Security)
_PORTS: dict[Security, int] = {"starttls": 587, "ssl": 465, "none": 25}


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertSettings:
    webhooks: bool = False
    """Whether webhooks are enabled."""
    webhook_hosts: frozenset[str] = frozenset()
    """Origins, as in `https://host:port`, that need be neither public nor on port 443."""
    smtp_host: str = ""
    smtp_port: int = 0
    smtp_user: str = ""
    smtp_password: str = field(default="", repr=False)
    smtp_from: str = ""
    smtp_security: Security = "starttls"

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> AlertSettings:
        """Raises ValueError, which names the variable."""
        security = environment.get("HOLDFAST_SMTP_SECURITY", "starttls")
        if security not in SECURITIES:
            raise ValueError(f"HOLDFAST_SMTP_SECURITY {security!r} is not one of {', '.join(SECURITIES)}")
        host, sender = environment.get("HOLDFAST_SMTP_HOST", ""), environment.get("HOLDFAST_SMTP_FROM", "")
        if host and "@" not in sender:
            raise ValueError("HOLDFAST_SMTP_FROM must be the sender's email address if HOLDFAST_SMTP_HOST is set")
        for name in ("HOLDFAST_SMTP_USER", "HOLDFAST_SMTP_PASSWORD"):
            if not environment.get(name, "").isascii():
                raise ValueError(f"{name} must be ASCII: SMTP logins support nothing else")
        return cls(
            webhooks=_switch(environment, "HOLDFAST_WEBHOOKS"),
            webhook_hosts=frozenset(map(_origin, environment.get("HOLDFAST_WEBHOOK_HOSTS", "").split())),
            smtp_host=host,
            smtp_port=_port(environment, "HOLDFAST_SMTP_PORT", _PORTS[security]),
            smtp_user=environment.get("HOLDFAST_SMTP_USER", ""),
            smtp_password=environment.get("HOLDFAST_SMTP_PASSWORD", ""),
            smtp_from=sender,
            smtp_security=security,
        )


def origin_of(scheme: str, host: str, port: int | None) -> str:
    return f"{scheme}://{host}:{port or (443 if scheme == 'https' else 80)}"


def _origin(text: str) -> str:
    """Return the full origin for `hooks.example.org`, `hooks.example.org:8443` or `http://10.0.0.7:9000`."""
    try:
        parts = urlsplit(text if "://" in text else f"https://{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or parts.scheme not in ("http", "https") or parts.path.strip("/") or parts.username:
        raise ValueError(
            f"HOLDFAST_WEBHOOK_HOSTS: invalid host {text!r}: write hooks.example.org:8443 or http://10.0.0.7:9000"
        )
    return origin_of(parts.scheme, host, port)


def _switch(environment: Mapping[str, str], name: str) -> bool:
    text = environment.get(name, "off").strip().lower()
    if text not in ("on", "off", "1", "0", "true", "false", ""):
        raise ValueError(f"{name} must be on or off, not {text!r}")
    return text in ("on", "1", "true")


def _port(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, "") or str(default)
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 65536):
        raise ValueError(f"{name} must be a port number, not {text!r}")
    return int(text)
