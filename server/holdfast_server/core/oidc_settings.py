"""Settings of the identity provider, from the environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from holdfast_server.core.principal import Role

PREFIX = "HOLDFAST_OIDC_"
ALL_GROUPS = "*"
_REQUIRED = ("ISSUER", "CLIENT_ID", "CLIENT_SECRET", "ROLES")
_KNOWN = (*_REQUIRED, "LABEL", "NAME_CLAIM", "GROUPS_CLAIM", "SCOPES")


@dataclass(frozen=True, slots=True)
class Grant:
    """A role that the members of a group of the provider have."""

    group: str
    role: Role
    project: str | None
    """`None` for the whole server; administrators only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderSettings:
    issuer: str
    client_id: str
    client_secret: str = field(repr=False)
    grants: tuple[Grant, ...]
    label: str = "your organization"
    """Text of the button: Sign in with ..."""
    name_claim: str = "preferred_username"
    groups_claim: str = "groups"
    scopes: str = "openid profile email"


def from_environment(environment: Mapping[str, str]) -> ProviderSettings | None:
    """Return the settings, or `None` if there are none. Raises ValueError, which names the variable."""
    values = {
        key.removeprefix(PREFIX): value.strip()
        for key, value in environment.items()
        if key.startswith(PREFIX) and value.strip()
    }
    if not values:
        return None
    for name in values:
        if name not in _KNOWN:
            raise ValueError(
                f"unknown setting {PREFIX}{name}: use one of {', '.join(PREFIX + one for one in _KNOWN)}"
            )
    for name in _REQUIRED:
        if name not in values:
            raise ValueError(f"{PREFIX}{name} is missing: an identity provider needs it")
    issuer = urlsplit(values["ISSUER"])
    if issuer.scheme != "https" and issuer.hostname not in ("127.0.0.1", "localhost", "::1"):
        raise ValueError(f"{PREFIX}ISSUER {values['ISSUER']!r}: the URL of an identity provider must use https")
    grants = tuple(_grant(text.strip()) for text in values.pop("ROLES").split(",") if text.strip())
    return ProviderSettings(grants=grants, **{name.lower(): value for name, value in values.items()})


def _grant(text: str) -> Grant:
    group, _, right = text.partition("=")
    role, _, project = (part.strip() for part in right.partition("@"))
    if group.strip() and role in Role.__members__ and (project or role == "admin"):
        return Grant(group.strip(), Role[role], project or None)
    raise ValueError(
        f"{PREFIX}ROLES: invalid entry {text!r}; write GROUP=ROLE@PROJECT, as in research=operator@vision, "
        "GROUP=admin for server admins, and * for all groups, separated by commas"
    )
