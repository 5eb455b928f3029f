"""Values that operators change while a job trains."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision: str = "0012"
down_revision: str | None = "0011"

_NUMBER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "job_values",
        sa.Column("job", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("definition", sa.String(), nullable=False),
        sa.Column("value", sa.String(), nullable=False),
        sa.Column("is_default", sa.Boolean(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["job"], ["jobs.name"], name="fk_job_values_job_jobs"),
        sa.PrimaryKeyConstraint("job", "name", name="pk_job_values"),
    )
    op.create_table(
        "value_changes",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("job", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("value", sa.String(), nullable=False),
        sa.Column("before", sa.String(), nullable=False),
        sa.Column("who", sa.String(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("version", _NUMBER, nullable=False),
        sa.Column("made_in_lineage", _NUMBER, nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("iteration", _NUMBER, nullable=True),
        sa.Column("lineage", _NUMBER, nullable=True),
        sa.Column("reason", sa.String(), nullable=True),
        sa.ForeignKeyConstraint(["job"], ["jobs.name"], name="fk_value_changes_job_jobs"),
        sa.PrimaryKeyConstraint("id", name="pk_value_changes"),
    )
    op.create_index("ix_value_changes_job_version", "value_changes", ["job", "version"])
