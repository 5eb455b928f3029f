"""Who launched an attempt, its labels, and what each rank's part of a checkpoint took"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision: str = "0012"
down_revision: str | None = "0011"


def upgrade() -> None:
    op.add_column("attempts", sa.Column("owner", sa.String(), nullable=True))
    op.add_column("attempts", sa.Column("labels", sa.LargeBinary(), nullable=True))
    op.add_column("checkpoints", sa.Column("ranks", sa.LargeBinary(), nullable=True))


def downgrade() -> None:
    op.drop_column("checkpoints", "ranks")
    op.drop_column("attempts", "labels")
    op.drop_column("attempts", "owner")
