"""Restores that leave out data, and lineages without that data."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision: str = "0007"
down_revision: str | None = "0006"


def upgrade() -> None:
    op.add_column("orders", sa.Column("skip", sa.String(), nullable=True))
    op.add_column("lineages", sa.Column("left_out", sa.String(), nullable=True))
