"""An index on when jobs were heard of, by which the fleet lists those that have ended"""

from __future__ import annotations

from alembic import op

revision: str = "0016"
down_revision: str | None = "0015"


def upgrade() -> None:
    op.create_index(op.f("ix_jobs_last_contact_at"), "jobs", ["last_contact_at"])


def downgrade() -> None:
    op.drop_index(op.f("ix_jobs_last_contact_at"), table_name="jobs")
