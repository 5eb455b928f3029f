"""Protected jobs, and what waits for the approval of a second person."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision: str = "0015"
down_revision: str | None = "0014"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("protected", sa.Boolean(), nullable=False, server_default=sa.text("false")))
    op.create_table(
        "approvals",
        *(
            sa.Column(name, sa.String(), nullable=False)
            for name in ("id", "job", "what", "request", "who", "owner")
        ),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("decided_by", sa.String(), nullable=True),
        sa.Column("decided_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["job"], ["jobs.name"], name="fk_approvals_job_jobs"),
        sa.PrimaryKeyConstraint("id", name="pk_approvals"),
    )
    op.create_index("ix_approvals_job_created_at", "approvals", ["job", "created_at"])
