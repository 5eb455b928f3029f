"""Metrics of checkpoints, to choose one by its loss; places of ranks; indexes by time for reports on many jobs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision: str = "0013"
down_revision: str | None = "0012"

_TIMES = (
    ("alerts", "fired_at"), ("alerts", "acknowledged_at"), ("annotations", "written_at"),
    ("attempts", "started_at"), ("orders", "created_at"), ("settings_versions", "at"),
)  # fmt: skip


def upgrade() -> None:
    op.add_column("checkpoints", sa.Column("metrics", sa.LargeBinary(), nullable=True))
    for table, column in _TIMES:
        op.create_index(f"ix_{table}_{column}", table, [column])
    number = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    op.create_table(
        "rank_places",
        sa.Column("job", sa.String(), nullable=False),
        sa.Column("rank", number, autoincrement=False, nullable=False),
        sa.Column("uid", sa.String(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("host", sa.String(), nullable=False),
        sa.Column("device", sa.String(), nullable=False),
        sa.Column("scheduler_job", sa.String(), nullable=False),
        sa.ForeignKeyConstraint(["job"], ["jobs.name"], name="fk_rank_places_job_jobs"),
        sa.PrimaryKeyConstraint("job", "rank", name="pk_rank_places"),
    )
