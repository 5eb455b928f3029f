"""The account of GPU time and storage."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision: str = "0016"
down_revision: str | None = "0015"

_NUMBER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "account_groups",
        sa.Column("id", _NUMBER, nullable=False),
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        *(sa.Column(name, sa.String(), nullable=False) for name in ("job", "project", "owner", "labels", "store")),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("last_at", _NUMBER, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_account_groups"),
        sa.UniqueConstraint("digest", name="uq_account_groups_digest"),
    )
    op.create_index("ix_account_groups_job", "account_groups", ["job"])
    op.create_index("ix_account_groups_last_at", "account_groups", ["last_at"])
    op.create_table(
        "account_periods",
        sa.Column("group_id", _NUMBER, autoincrement=False, nullable=False),
        sa.Column("seconds", _NUMBER, autoincrement=False, nullable=False),
        sa.Column("begins_at", _NUMBER, autoincrement=False, nullable=False),
        *(
            sa.Column(name, _NUMBER, nullable=False)
            for name in (
                "productive", "snapshot_wait", "checkpoint_slowdown", "data_fetch", "barrier", "paused",
                "restoring", "starting", "lost", "down", "unexplained", "saved", "failures", "uncompared_failures",
                "written_bytes",
            )
        ),
        sa.ForeignKeyConstraint(
            ["group_id"], ["account_groups.id"], name="fk_account_periods_group_id_account_groups",
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("group_id", "seconds", "begins_at", name="pk_account_periods"),
        sqlite_with_rowid=False,
    )  # fmt: skip
    op.create_table(
        "account_jobs",
        sa.Column("job", sa.String(), nullable=False),
        sa.Column("accounted_at", sa.Double(), nullable=False),
        sa.Column("uid", sa.String(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("has_begun", sa.Boolean(), nullable=False),
        sa.Column("lineage", _NUMBER, nullable=False),
        *(sa.Column(name, sa.Double(), nullable=False) for name in ("settled_at", "pending_at", "pending_since")),
        sa.Column("store", sa.String(), nullable=False),
        sa.Column("stored_bytes", _NUMBER, nullable=False),
        sa.Column("backing_store", sa.String(), nullable=False),
        sa.Column("backing_bytes", _NUMBER, nullable=False),
        sa.Column("is_estimate", sa.Boolean(), nullable=False),
        sa.Column("unsized_checkpoints", _NUMBER, nullable=False),
        sa.ForeignKeyConstraint(["job"], ["jobs.name"], name="fk_account_jobs_job_jobs"),
        sa.PrimaryKeyConstraint("job", name="pk_account_jobs"),
    )
    op.create_table(
        "account_stores",
        sa.Column("store", sa.String(), nullable=False),
        sa.Column("day", _NUMBER, autoincrement=False, nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("free_bytes", _NUMBER, nullable=False),
        sa.PrimaryKeyConstraint("store", "day", name="pk_account_stores"),
    )
