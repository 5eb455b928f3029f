"""The write budget of a job and the unsaved work that operators accept, beside its overhead budget."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision: str = "0004"
down_revision: str | None = "0003"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("write_bytes_per_second", sa.Double(), nullable=True))
    op.add_column("jobs", sa.Column("max_unsaved_seconds", sa.Double(), nullable=True))
