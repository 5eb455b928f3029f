"""Intervals that hold for a while, and how far what is desired has been delivered"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision: str = "0008"
down_revision: str | None = "0007"


def upgrade() -> None:
    number = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    op.add_column("jobs", sa.Column("every_until", sa.Double(), nullable=True))
    op.add_column("jobs", sa.Column("delivered_version", number, nullable=False, server_default=sa.text("0")))


def downgrade() -> None:
    op.drop_column("jobs", "delivered_version")
    op.drop_column("jobs", "every_until")
