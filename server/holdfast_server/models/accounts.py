"""Users, sessions, API keys and the audit log."""

from __future__ import annotations

from sqlalchemy import ForeignKey, Index, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from holdfast_server.models.base import Base


class PersonRecord(Base):
    __tablename__ = "people"
    __table_args__ = (UniqueConstraint("issuer", "subject"),)

    name: Mapped[str] = mapped_column(primary_key=True)
    password: Mapped[str | None]
    """Argon2id hash; `None` for users of the identity provider, or before a password is chosen."""
    admin: Mapped[bool]
    """Whether the user administers the server, and so every project."""
    issuer: Mapped[str | None]
    subject: Mapped[str | None]
    """Subject at the identity provider, which is permanent; a name there is not."""
    created_at: Mapped[float]
    signed_in_at: Mapped[float | None]


class MembershipRecord(Base):
    """A user's role in one project."""

    __tablename__ = "memberships"

    person: Mapped[str] = mapped_column(ForeignKey("people.name", ondelete="CASCADE"), primary_key=True)
    project: Mapped[str] = mapped_column(
        ForeignKey("projects.name", ondelete="CASCADE"), primary_key=True, index=True
    )
    role: Mapped[str]


class SignInRecord(Base):
    """Session of a signed-in browser, until it signs out, is idle too long, or expires."""

    __tablename__ = "sign_ins"

    digest: Mapped[bytes] = mapped_column(primary_key=True)
    """Digest of the session id in the cookie, which a reader of the database cannot use to sign in."""
    id: Mapped[str] = mapped_column(unique=True)
    """Public id, with which the user ends the session."""
    person: Mapped[str] = mapped_column(ForeignKey("people.name", ondelete="CASCADE"), index=True)
    created_at: Mapped[float]
    seen_at: Mapped[float]
    """Time of last use, to the minute."""
    address: Mapped[str]
    browser: Mapped[str]


class SharedSessionRecord(Base):
    """Session of a browser that signed in with the shared secret."""

    __tablename__ = "shared_sessions"

    digest: Mapped[bytes] = mapped_column(primary_key=True)
    """HMAC of the cookie with the shared secret as key."""
    expires_at: Mapped[float]


class TokenRecord(Base):
    """API key of a program. It is shown once; its digest is stored, and a prefix to find it."""

    __tablename__ = "tokens"

    prefix: Mapped[str] = mapped_column(primary_key=True)
    digest: Mapped[bytes]
    name: Mapped[str]
    scopes: Mapped[str]
    """Scopes, separated by spaces."""
    project: Mapped[str | None] = mapped_column(ForeignKey("projects.name"), index=True)
    """Project of the key; `None`: all."""
    job: Mapped[str | None]
    """Job of the key, which need not exist yet; `None`: all jobs of the project."""
    created_by: Mapped[str]
    """Owner: the user who created it, directly or with another key."""
    created_at: Mapped[float]
    expires_at: Mapped[float | None]
    last_used_at: Mapped[float | None]
    """Time of last use, to ten minutes."""
    revoked_at: Mapped[float | None]


class OneTimeLinkRecord(Base):
    """A link that works once, to set up the server or to choose a new password."""

    __tablename__ = "one_time_links"

    digest: Mapped[bytes] = mapped_column(primary_key=True)
    person: Mapped[str | None] = mapped_column(ForeignKey("people.name", ondelete="CASCADE"), index=True)
    """User whose password it sets; `None`: it creates the first user."""
    created_at: Mapped[float]
    expires_at: Mapped[float]


class OidcFlowRecord(Base):
    """A sign-in in progress at the identity provider."""

    __tablename__ = "oidc_flows"

    digest: Mapped[bytes] = mapped_column(primary_key=True)
    nonce: Mapped[str]
    verifier: Mapped[str]
    then: Mapped[str]
    expires_at: Mapped[float] = mapped_column(index=True)


class RateLimitRecord(Base):
    """Token bucket that limits the attempts to sign in of a name, an address or a browser."""

    __tablename__ = "rate_limits"
    __table_args__ = (Index(None, "full_at"),)

    key: Mapped[bytes] = mapped_column(primary_key=True)
    full_at: Mapped[float]
    """Time at which the bucket is full again; each attempt moves it later."""


class AuditEntryRecord(Base):
    """Entry of the audit log, which outlives the accounts that it names. Triggers forbid UPDATE and DELETE."""

    __tablename__ = "audit"
    __table_args__ = (Index(None, "job", "id"), Index(None, "project", "id"), Index(None, "who", "id"))

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """Number without gaps, from 1."""
    at: Mapped[float]
    who: Mapped[str]
    action: Mapped[str]
    job: Mapped[str | None]
    project: Mapped[str | None]
    before: Mapped[str | None]
    after: Mapped[str | None]
    """Values after the change, as `before` in JSON."""
    request_id: Mapped[str]
    digest: Mapped[bytes]
    """SHA-256 of the previous entry's digest and this entry's other columns."""


class ServerAddressRecord(Base):
    """Single row with the address at which the server that started last is reached."""

    __tablename__ = "server_address"

    one: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    address: Mapped[str]
    started_at: Mapped[float]


class AuditHeadRecord(Base):
    """Single row with the end of the audit log's chain, which each writer locks."""

    __tablename__ = "audit_head"

    one: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    id: Mapped[int]
    digest: Mapped[bytes]


class SavedViewRecord(Base):
    """A filter, order and columns of the fleet page that a user saved under a name."""

    __tablename__ = "saved_views"

    user: Mapped[str] = mapped_column(primary_key=True)
    """Who saved it; no foreign key, as on a server without accounts all users are one."""
    name: Mapped[str] = mapped_column(primary_key=True)
    query: Mapped[str]
    """The query of the page's address."""
