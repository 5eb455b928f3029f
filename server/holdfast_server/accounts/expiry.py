"""Background jobs of accounts: delete expired rows, and log the head of the audit log."""

from __future__ import annotations

import logging

from sqlalchemy import delete, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast_server import models
from holdfast_server.accounts import rate_limits
from holdfast_server.accounts.sign_ins import IDLE_SECONDS, LASTS_SECONDS
from holdfast_server.db import Database, transaction

TIDY_SECONDS = 3600.0
ANCHOR_SECONDS = 3600.0

logger = logging.getLogger(__name__)


@transaction
async def delete_expired(session: AsyncSession, now: float) -> None:
    """Delete expired sessions, one-time links, OIDC flows and rate limits."""
    rows = models.SignInRecord
    ended = or_(rows.seen_at <= now - IDLE_SECONDS, rows.created_at <= now - LASTS_SECONDS)
    await session.execute(delete(rows).where(ended))
    for table in (models.SharedSessionRecord, models.OneTimeLinkRecord, models.OidcFlowRecord):
        await session.execute(delete(table).where(table.expires_at <= now))
    await rate_limits.delete_full(session, now=now)


async def log_audit_head(db: Database, _: float) -> None:
    """Log the newest row's digest: an audit log that was rewritten in the database no longer contains it."""
    head = models.AuditHeadRecord
    async with db.read() as session:
        row, digest = (await session.execute(select(head.id, head.digest))).one()
    if row:
        logger.info("the audit log is at %d:%s", row, digest.hex())
