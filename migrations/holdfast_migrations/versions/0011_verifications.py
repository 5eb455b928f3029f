"""Checkpoints that people had read back, and what was found"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision: str = "0011"
down_revision: str | None = "0010"


def upgrade() -> None:
    number = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    op.add_column("jobs", sa.Column("verify", sa.String(), nullable=True))
    op.create_table(
        "verifications",
        sa.Column("job", sa.String(), nullable=False),
        sa.Column("checkpoint", sa.String(), nullable=False),
        sa.Column("request", number, nullable=False),
        sa.Column("against", sa.String(), nullable=True),
        sa.Column("asked_by", sa.String(), nullable=False),
        sa.Column("asked_at", sa.Double(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("host", sa.String(), nullable=False),
        sa.Column("read_bytes", number, nullable=False),
        sa.Column("total_bytes", number, nullable=False),
        sa.Column("seconds", sa.Double(), nullable=True),
        sa.Column("reason", sa.String(), nullable=True),
        sa.Column("verdict", sa.String(), nullable=True),
        sa.Column("verified_at", sa.Double(), nullable=True),
        sa.Column("verified_host", sa.String(), nullable=False),
        sa.Column("tensors", sa.LargeBinary(), nullable=True),
        sa.Column("tensors_at", sa.Double(), nullable=True),
        sa.Column("tensors_against", sa.String(), nullable=True),
        sa.ForeignKeyConstraint(["job"], ["jobs.name"], name=op.f("fk_verifications_job_jobs")),
        sa.PrimaryKeyConstraint("job", "checkpoint", name=op.f("pk_verifications")),
    )


def downgrade() -> None:
    op.drop_table("verifications")
    op.drop_column("jobs", "verify")
