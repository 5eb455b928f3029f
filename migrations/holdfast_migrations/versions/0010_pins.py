"""Pins and labels of checkpoints"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision: str = "0010"
down_revision: str | None = "0009"


def upgrade() -> None:
    op.add_column("checkpoints", sa.Column("label", sa.String(), nullable=True))
    op.add_column("checkpoints", sa.Column("pinned_by", sa.String(), nullable=True))
    op.add_column("checkpoints", sa.Column("pinned_at", sa.Double(), nullable=True))
    op.add_column("jobs", sa.Column("pins", sa.String(), nullable=True))


def downgrade() -> None:
    op.drop_column("jobs", "pins")
    op.drop_column("checkpoints", "pinned_at")
    op.drop_column("checkpoints", "pinned_by")
    op.drop_column("checkpoints", "label")
