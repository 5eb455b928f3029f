"""People, keys and the audit log."""

from __future__ import annotations

import msgspec


class TokenRow(msgspec.Struct, kw_only=True, frozen=True):
    """A key as it is listed: all but the key."""

    prefix: str
    name: str = ""
    scopes: list[str] = []
    project: str | None = None
    job: str | None = None
    created_by: str = ""
    created_at: float = 0.0
    expires_at: float | None = None
    last_used_at: float | None = None
    revoked_at: float | None = None
    state: str
    """`works`, `expired` or `revoked`."""


class PersonRow(msgspec.Struct, kw_only=True, frozen=True):
    """Somebody who may sign in."""

    name: str = ""
    admin: bool = False
    roles: dict[str, str] = {}
    """By project."""
    signs_in_by: str = ""
    """`password`, `identity provider`, or `link` where neither is set yet."""
    created_at: float = 0.0
    signed_in_at: float | None = None


class NewToken(msgspec.Struct, kw_only=True, frozen=True):
    """A key, told once, and how it is listed."""

    token: str
    listed: TokenRow


class AuditEntry(msgspec.Struct, kw_only=True, frozen=True):
    """A row of the audit log: who changed what."""

    id: int
    at: float = 0.0
    who: str = ""
    action: str = ""
    job: str | None = None
    project: str | None = None
    before: str | None = None
    """What it was, by name, in JSON."""
    after: str | None = None
    request_id: str = ""
    digest: str = ""
    """Seals this row and the one before it, in hexadecimal."""
