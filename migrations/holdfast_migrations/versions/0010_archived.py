"""Archived jobs, and saved views of the fleet."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision: str = "0010"
down_revision: str | None = "0009"

_STANDING = (
    "project",
    "name",
    "uid",
    "last_contact_at",
    "longest_seconds",
    "paused",
    "paused_version",
    "applied_version",
    "iteration",
    "training_paused_at",
    "archived_at",
)


def upgrade() -> None:
    op.add_column("jobs", sa.Column("archived_at", sa.Double(), nullable=True))
    op.drop_index("ix_jobs_standing", "jobs")
    op.create_index("ix_jobs_standing", "jobs", _STANDING)
    op.create_table(
        "saved_views",
        sa.Column("user", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("query", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("user", "name", name="pk_saved_views"),
    )
