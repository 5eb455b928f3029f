"""Indexes for what is asked by time, for intervals that end, and for what was told of an alert"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision: str = "0009"
down_revision: str | None = "0008"


def upgrade() -> None:
    op.create_index(op.f("ix_stalls_job_at"), "stalls", ["job", "at"])
    op.create_index(op.f("ix_pacings_job_at"), "pacings", ["job", "at"])
    op.create_index(op.f("ix_attempts_job_started_at"), "attempts", ["job", "started_at"])
    op.create_index(op.f("ix_alert_deliveries_alert"), "alert_deliveries", ["alert"])
    ends = sa.text("every_until IS NOT NULL")
    op.create_index(op.f("ix_jobs_every_until"), "jobs", ["every_until"], sqlite_where=ends, postgresql_where=ends)


def downgrade() -> None:
    op.drop_index(op.f("ix_jobs_every_until"), "jobs")
    op.drop_index(op.f("ix_alert_deliveries_alert"), "alert_deliveries")
    op.drop_index(op.f("ix_attempts_job_started_at"), "attempts")
    op.drop_index(op.f("ix_pacings_job_at"), "pacings")
    op.drop_index(op.f("ix_stalls_job_at"), "stalls")
