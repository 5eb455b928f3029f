"""The exception in the output of an attempt, which was looked for anew after each start of the server."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision: str = "0003"
down_revision: str | None = "0002"


def upgrade() -> None:
    op.add_column("attempts", sa.Column("exception", sa.String(), nullable=True))
