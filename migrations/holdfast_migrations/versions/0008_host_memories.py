"""What the memory of hosts holds, and the stores of attempts."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision: str = "0008"
down_revision: str | None = "0007"


def upgrade() -> None:
    op.add_column("attempts", sa.Column("stores", sa.String(), nullable=True))
    number = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    op.create_table(
        "host_memories",
        sa.Column("job", sa.String(), nullable=False),
        sa.Column("rank", number, autoincrement=False, nullable=False),
        sa.Column("uid", sa.String(), nullable=False),
        sa.Column("host", sa.String(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("snapshots", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["job"], ["jobs.name"], name="fk_host_memories_job_jobs"),
        sa.PrimaryKeyConstraint("job", "rank", name="pk_host_memories"),
    )
