"""Tensors of which an incremental checkpoint stores only rows."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision: str = "0011"
down_revision: str | None = "0010"


def upgrade() -> None:
    op.add_column("checkpoints", sa.Column("changed", sa.LargeBinary(), nullable=True))
