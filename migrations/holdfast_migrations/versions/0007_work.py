"""Work by the ten minutes, and how long a job's newest iterations took at most"""

from __future__ import annotations

import math

import msgspec
import sqlalchemy as sa
from alembic import op

revision: str = "0007"
down_revision: str | None = "0006"

STANDING = [
    "project",
    "name",
    "uid",
    "last_contact_at",
    "longest_seconds",
    "paused",
    "paused_version",
    "applied_version",
    "iteration",
]


def upgrade() -> None:
    op.add_column("jobs", sa.Column("longest_seconds", sa.Double(), nullable=False, server_default=sa.text("0")))
    _fill_longest()
    op.create_index("ix_jobs_standing", "jobs", STANDING)
    number = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    op.create_table(
        "work",
        sa.Column("job", sa.String(), nullable=False),
        sa.Column("uid", sa.String(), nullable=False),
        sa.Column("rank", number, nullable=False),
        sa.Column("lineage", number, nullable=False),
        sa.Column("bucket", number, nullable=False),
        sa.Column("first_iteration", number, nullable=False),
        sa.Column("last_iteration", number, nullable=False),
        sa.Column("begins_at", sa.Double(), nullable=False),
        sa.Column("ends_at", sa.Double(), nullable=False),
        sa.Column("iterations", number, nullable=False),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.Column("longest_seconds", sa.Double(), nullable=False),
        sa.Column("stall_seconds", sa.Double(), nullable=False),
        sa.Column("data_seconds", sa.Double(), nullable=False),
        sa.Column("barrier_iterations", number, nullable=False),
        sa.Column("barrier_seconds", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["job"], ["jobs.name"], name=op.f("fk_work_job_jobs")),
        sa.PrimaryKeyConstraint("job", "rank", "bucket", "uid", "lineage", name=op.f("pk_work")),
    )
    with op.batch_alter_table("work") as work:
        work.create_index(op.f("ix_work_job_bucket"), ["job", "bucket"])
    with op.batch_alter_table("stalls") as stalls:
        stalls.create_index(op.f("ix_stalls_job_kind_at"), ["job", "kind", "at"])


def _fill_longest() -> None:
    """From what is known of the newest iterations, so that a job of long ones is not taken for silent."""
    connection = op.get_bind()
    jobs = sa.table("jobs", sa.column("name"), sa.column("recent"), sa.column("longest_seconds"))
    rows = connection.execute(sa.select(jobs.c.name, jobs.c.recent)).all()
    for name, recent in rows:
        seconds = msgspec.msgpack.decode(recent).get("seconds", []) if recent else []
        longest = max(filter(math.isfinite, seconds), default=0.0)
        connection.execute(sa.update(jobs).where(jobs.c.name == name).values(longest_seconds=longest))


def downgrade() -> None:
    with op.batch_alter_table("stalls") as stalls:
        stalls.drop_index(op.f("ix_stalls_job_kind_at"))
    op.drop_table("work")
    op.drop_index("ix_jobs_standing", "jobs")
    op.drop_column("jobs", "longest_seconds")
