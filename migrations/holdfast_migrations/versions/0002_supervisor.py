"""What supervisors report after a start has ended, and the address of the server that runs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision: str = "0002"
down_revision: str | None = "0001"


def upgrade() -> None:
    op.add_column("attempts", sa.Column("supervisor", sa.String(), nullable=True))
    op.add_column("attempts", sa.Column("supervisor_until", sa.Double(), nullable=True))
    op.add_column("attempts", sa.Column("supervisor_report", sa.LargeBinary(), nullable=True))
    op.create_table(
        "server_address",
        sa.Column(
            "one", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=False, nullable=False
        ),
        sa.Column("address", sa.String(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("one", name="pk_server_address"),
    )
