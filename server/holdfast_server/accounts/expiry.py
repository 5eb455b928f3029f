"""What has ended is taken out of the database, and the end of the audit log is told to whoever keeps the logs."""

from __future__ import annotations

import logging

from sqlalchemy import delete, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast_server import models
from holdfast_server.accounts import rate_limits
from holdfast_server.accounts.sign_ins import IDLE_SECONDS, LASTS_SECONDS
from holdfast_server.db import Database

TIDY_SECONDS = 3600.0
ANCHOR_SECONDS = 3600.0

logger = logging.getLogger(__name__)


async def tidy(db: Database, now: float) -> None:
    """Browsers that are signed out, links that are dead, sign-ins that nobody came back from, tries forgiven."""

    async def work(session: AsyncSession) -> None:
        rows = models.SignInRecord
        over = or_(rows.seen_at <= now - IDLE_SECONDS, rows.created_at <= now - LASTS_SECONDS)
        await session.execute(delete(rows).where(over))
        shared = models.SharedSessionRecord
        await session.execute(delete(shared).where(shared.expires_at <= now))
        await session.execute(delete(models.LinkRecord).where(models.LinkRecord.expires_at <= now))
        await session.execute(delete(models.HandshakeRecord).where(models.HandshakeRecord.expires_at <= now))
        await rate_limits.tidy(session, now=now)

    await db.write(work)


async def anchor(db: Database, _: float) -> None:
    """A log that is written anew in the database differs from what stands in the server's own log."""
    head = models.AuditHeadRecord
    async with db.read() as session:
        row, digest = (await session.execute(select(head.id, head.digest))).one()
    if row:
        logger.info("the audit log is at %d:%s", row, digest.hex())
