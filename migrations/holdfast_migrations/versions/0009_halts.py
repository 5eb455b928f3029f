"""Pauses and ends of training on request."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision: str = "0009"
down_revision: str | None = "0008"

_NUMBER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_STANDING = (
    "project", "name", "uid", "last_contact_at", "longest_seconds", "paused", "paused_version", "applied_version",
    "iteration",
)  # fmt: skip


def upgrade() -> None:
    op.add_column("jobs", sa.Column("training_order", sa.String(), nullable=True))
    op.add_column("jobs", sa.Column("training_paused_at", sa.Double(), nullable=True))
    op.add_column("jobs", sa.Column("training_paused_by", sa.String(), nullable=True))
    op.drop_index("ix_jobs_standing", "jobs")
    op.create_index("ix_jobs_standing", "jobs", [*_STANDING, "training_paused_at"])
    op.add_column("attempts", sa.Column("ended_by", sa.String(), nullable=True))
    op.create_table(
        "training_pauses",
        sa.Column("id", _NUMBER, nullable=False),
        sa.Column("job", sa.String(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("iteration", _NUMBER, nullable=False),
        sa.Column("lineage", _NUMBER, nullable=False),
        sa.Column("uid", sa.String(), nullable=False),
        sa.Column("who", sa.String(), nullable=False),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["job"], ["jobs.name"], name="fk_training_pauses_job_jobs"),
        sa.PrimaryKeyConstraint("id", name="pk_training_pauses"),
    )
    op.create_index("ix_training_pauses_job_at", "training_pauses", ["job", "at"])
