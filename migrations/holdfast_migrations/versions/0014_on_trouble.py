"""The rule about wrong losses, as a setting and as attempts follow it, and their batches in an iteration."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision: str = "0014"
down_revision: str | None = "0013"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("on_trouble", sa.String(), nullable=True))
    op.add_column("attempts", sa.Column("on_trouble", sa.String(), nullable=True))
    number = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    op.add_column("attempts", sa.Column("batches_an_iteration", number, nullable=True))
