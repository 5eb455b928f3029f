"""Where checkpoints are that the store behind a drained directory has."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision: str = "0006"
down_revision: str | None = "0005"


def upgrade() -> None:
    op.add_column("checkpoints", sa.Column("copy_place", sa.String(), nullable=True))
