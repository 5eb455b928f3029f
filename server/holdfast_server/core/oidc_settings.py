"""What a server has to be told of its identity provider, in the environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from holdfast_server.core.principal import Role

PREFIX = "HOLDFAST_OIDC_"
EVERYBODY = "*"


@dataclass(frozen=True, slots=True)
class Grant:
    """What members of one of the provider's groups may do here."""

    group: str
    role: Role
    project: str | None
    """None: the whole server; that is for admins only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderSettings:
    issuer: str
    client_id: str
    client_secret: str = field(repr=False)
    grants: tuple[Grant, ...]
    label: str = "your organisation"
    """What its button says: Sign in with ..."""
    name_claim: str = "preferred_username"
    groups_claim: str = "groups"
    scopes: str = "openid profile email"


def from_environment(environment: Mapping[str, str]) -> ProviderSettings | None:
    """None where nobody names a provider; ValueError, naming the variable, for what is missing or none."""
    told = {
        key.removeprefix(PREFIX): value.strip() for key, value in environment.items() if key.startswith(PREFIX)
    }
    told = {name: value for name, value in told.items() if value}
    if not told:
        return None
    known = ("ISSUER", "CLIENT_ID", "CLIENT_SECRET", "ROLES", "LABEL", "NAME_CLAIM", "GROUPS_CLAIM", "SCOPES")
    for name in told:
        if name not in known:
            raise ValueError(f"{PREFIX}{name} is no setting: there are {', '.join(PREFIX + one for one in known)}")
    for name in ("ISSUER", "CLIENT_ID", "CLIENT_SECRET", "ROLES"):
        if name not in told:
            raise ValueError(f"{PREFIX}{name} is missing: an identity provider needs it")
    roles = tuple(_grant(text.strip()) for text in told.pop("ROLES").split(",") if text.strip())
    return ProviderSettings(grants=roles, **{name.lower(): value for name, value in told.items()})


def _grant(text: str) -> Grant:
    group, _, right = text.partition("=")
    role, _, project = (part.strip() for part in right.partition("@"))
    if group.strip() and role in Role.__members__ and (project or role == "admin"):
        return Grant(group.strip(), Role[role], project or None)
    raise ValueError(
        f"{PREFIX}ROLES: {text!r} is none; write GROUP=ROLE@PROJECT, as in research=operator@vision, "
        "GROUP=admin for the whole server, and * for everybody, with commas between"
    )
