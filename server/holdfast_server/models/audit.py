"""The audit log: who changed what, a row each, and no row ever again."""

from __future__ import annotations

from sqlalchemy import Index
from sqlalchemy.orm import Mapped, mapped_column

from holdfast_server.models.base import Base


class AuditEntry(Base):
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


class AuditHead(Base):
    """One row: where the chain ends. Whoever adds to it locks this, so that no two rows follow the same one."""

    __tablename__ = "audit_head"

    one: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    id: Mapped[int]
    digest: Mapped[bytes]
