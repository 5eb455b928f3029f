"""People and keys: who may sign in or report, with which rights, and who changed what."""

from __future__ import annotations

from sqlalchemy import ForeignKey, Index, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from holdfast_server.models.base import Base


class PersonRecord(Base):
    __tablename__ = "people"
    __table_args__ = (UniqueConstraint("issuer", "subject"),)

    name: Mapped[str] = mapped_column(primary_key=True)
    password: Mapped[str | None]
    """Argon2id; None: they sign in through the identity provider, or have a link to choose one."""
    admin: Mapped[bool]
    """Of the whole server, and so of every project."""
    issuer: Mapped[str | None]
    subject: Mapped[str | None]
    """Who they are at the identity provider; a name there may change hands, this does not."""
    created_at: Mapped[float]
    signed_in_at: Mapped[float | None]


class MembershipRecord(Base):
    """A person's role in one project."""

    __tablename__ = "memberships"

    person: Mapped[str] = mapped_column(ForeignKey("people.name", ondelete="CASCADE"), primary_key=True)
    project: Mapped[str] = mapped_column(
        ForeignKey("projects.name", ondelete="CASCADE"), primary_key=True, index=True
    )
    role: Mapped[str]


class SignInRecord(Base):
    """A browser that is signed in, until it signs out, rests too long, or its time is over."""

    __tablename__ = "sign_ins"

    digest: Mapped[bytes] = mapped_column(primary_key=True)
    """Of the id in the cookie: who reads the database cannot sign in with what is in it."""
    id: Mapped[str] = mapped_column(unique=True)
    """By which its owner names it, to end it."""
    person: Mapped[str] = mapped_column(ForeignKey("people.name", ondelete="CASCADE"), index=True)
    created_at: Mapped[float]
    seen_at: Mapped[float]
    """To the minute."""
    address: Mapped[str]
    browser: Mapped[str]


class SharedSessionRecord(Base):
    """A browser in which somebody typed the shared secret, until it signs out or the session expires."""

    __tablename__ = "shared_sessions"

    digest: Mapped[bytes] = mapped_column(primary_key=True)
    """HMAC of the cookie, keyed with the shared secret."""
    expires_at: Mapped[float]


class TokenRecord(Base):
    """A key for a program. It is shown once; kept are its digest, and its beginning to find it by."""

    __tablename__ = "tokens"

    prefix: Mapped[str] = mapped_column(primary_key=True)
    digest: Mapped[bytes]
    name: Mapped[str]
    scopes: Mapped[str]
    """Words with blanks between."""
    project: Mapped[str | None] = mapped_column(ForeignKey("projects.name"), index=True)
    """None: every project."""
    job: Mapped[str | None]
    """None: every job of the project. It need not have reported yet."""
    created_by: Mapped[str]
    """Whose it is: that of a person who made it, or whose key did."""
    created_at: Mapped[float]
    expires_at: Mapped[float | None]
    last_used_at: Mapped[float | None]
    """To ten minutes."""
    revoked_at: Mapped[float | None]


class LinkRecord(Base):
    """A link that works once: to set the server up, or to choose a new password."""

    __tablename__ = "links"

    digest: Mapped[bytes] = mapped_column(primary_key=True)
    person: Mapped[str | None] = mapped_column(ForeignKey("people.name", ondelete="CASCADE"), index=True)
    """Whose password it sets; None: it makes the first person."""
    created_at: Mapped[float]
    expires_at: Mapped[float]


class HandshakeRecord(Base):
    """Somebody is at the identity provider, and is expected back."""

    __tablename__ = "handshakes"

    digest: Mapped[bytes] = mapped_column(primary_key=True)
    nonce: Mapped[str]
    verifier: Mapped[str]
    then: Mapped[str]
    expires_at: Mapped[float] = mapped_column(index=True)


class AllowanceRecord(Base):
    """How many tries to sign in are left, for a name, an address or a browser: a bucket that fills by itself."""

    __tablename__ = "allowances"
    __table_args__ = (Index(None, "full_at"),)

    key: Mapped[bytes] = mapped_column(primary_key=True)
    full_at: Mapped[float]
    """When it is full again; each try moves it on."""


class AuditEntryRecord(Base):
    """Names are no references: what somebody did outlives their account. Triggers forbid UPDATE and DELETE."""

    __tablename__ = "audit"
    __table_args__ = (Index(None, "job", "id"), Index(None, "project", "id"), Index(None, "who", "id"))

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """Counts up without a gap from 1."""
    at: Mapped[float]
    who: Mapped[str]
    action: Mapped[str]
    job: Mapped[str | None]
    project: Mapped[str | None]
    before: Mapped[str | None]
    after: Mapped[str | None]
    """What it was and what it became, in JSON."""
    request_id: Mapped[str]
    digest: Mapped[bytes]
    """SHA-256 over the digest of the row before and all that this one holds."""


class AuditHeadRecord(Base):
    """One row: where the chain ends. Whoever adds to it locks this, so that no two rows follow the same one."""

    __tablename__ = "audit_head"

    one: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    id: Mapped[int]
    digest: Mapped[bytes]
