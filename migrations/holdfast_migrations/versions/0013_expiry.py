"""Restore orders end by a time of their own, and may be unknown"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision: str = "0013"
down_revision: str | None = "0012"


def upgrade() -> None:
    op.add_column("orders", sa.Column("expires_at", sa.Double(), nullable=True))
    op.add_column(
        "orders", sa.Column("taken_by", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=True)
    )
    op.execute(sa.text("UPDATE orders SET expires_at = created_at + 7 * 86400.0"))  # what all had before
    _one_open_order("state IN ('requested', 'delivered', 'restoring', 'unknown')")


def downgrade() -> None:
    op.execute(sa.text("UPDATE orders SET state = 'restoring' WHERE state = 'unknown'"))
    _one_open_order("state IN ('requested', 'delivered', 'restoring')")
    op.drop_column("orders", "taken_by")
    op.drop_column("orders", "expires_at")


def _one_open_order(states: str) -> None:
    op.drop_index("uq_orders_open", table_name="orders")
    op.create_index(
        "uq_orders_open",
        "orders",
        ["job"],
        unique=True,
        sqlite_where=sa.text(states),
        postgresql_where=sa.text(states),
    )
