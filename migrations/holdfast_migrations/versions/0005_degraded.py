"""Degraded restores, and lineages that are inexact after one."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision: str = "0005"
down_revision: str | None = "0004"


def upgrade() -> None:
    op.add_column("orders", sa.Column("degraded", sa.Boolean(), server_default=sa.false(), nullable=False))
    op.add_column("lineages", sa.Column("inexact", sa.String(), nullable=True))
