"""Stores that jobs share, what each job writes there, and limits for it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision: str = "0017"
down_revision: str | None = "0016"

_NUMBER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_ZERO, _ONE = sa.text("0"), sa.text("1")


def upgrade() -> None:
    op.add_column("jobs", sa.Column("share_number", _NUMBER, nullable=False, server_default=_ZERO))
    op.create_table(
        "stores",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("address", sa.String(), nullable=False),
        sa.Column("host", sa.String(), nullable=False),
        sa.Column("free_bytes", _NUMBER, nullable=True),
        sa.Column("at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_stores"),
    )
    op.create_table(
        "store_limits",
        sa.Column("target", sa.String(), nullable=False),
        sa.Column("bytes_per_second", sa.Double(), nullable=False),
        sa.Column("writers", _NUMBER, nullable=False),
        sa.Column("fallback_bytes_per_second", sa.Double(), nullable=True),
        sa.Column("holds_seconds", sa.Double(), nullable=False),
        sa.Column("who", sa.String(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("target", name="pk_store_limits"),
    )
    op.create_table(
        "store_writers",
        *(sa.Column(name, sa.String(), nullable=False) for name in ("job", "address", "store", "uid")),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("written_bytes", _NUMBER, nullable=False),
        sa.Column("earlier_bytes", _NUMBER, nullable=False, server_default=_ZERO),
        sa.Column("bytes_per_second", sa.Double(), nullable=True),
        sa.Column("waiting_bytes", _NUMBER, nullable=False),
        sa.Column("checkpoint_bytes", _NUMBER, nullable=False),
        sa.Column("interval_seconds", sa.Double(), nullable=True),
        sa.Column("writing", sa.Boolean(), nullable=False),
        sa.Column("wants", _NUMBER, nullable=False),
        sa.Column("wanted_at", sa.Double(), nullable=True),
        sa.Column("started", _NUMBER, nullable=False),
        sa.Column("earned_at", sa.Double(), nullable=True),
        sa.Column("weight", sa.Double(), nullable=False, server_default=_ONE),
        sa.Column("granted", _NUMBER, nullable=False, server_default=_ZERO),
        sa.Column("granted_at", sa.Double(), nullable=True),
        *(
            sa.Column(name, sa.Double(), nullable=True)
            for name in (
                "share_bytes_per_second",
                "fair_bytes_per_second",
                "fallback_bytes_per_second",
                "longest_wait_seconds",
                "holds_seconds",
            )
        ),
        sa.Column("number", _NUMBER, nullable=False, server_default=_ZERO),
        sa.ForeignKeyConstraint(["job"], ["jobs.name"], name="fk_store_writers_job_jobs"),
        sa.PrimaryKeyConstraint("job", "address", name="pk_store_writers"),
    )
    op.create_index("ix_store_writers_store", "store_writers", ["store"])
