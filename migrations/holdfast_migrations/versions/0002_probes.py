"""Probes of the data"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision: str = "0002"
down_revision: str | None = "0001"


def upgrade() -> None:
    counter = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    op.add_column("jobs", sa.Column("probe_request", counter, nullable=False, server_default=sa.text("0")))


def downgrade() -> None:
    op.drop_column("jobs", "probe_request")
