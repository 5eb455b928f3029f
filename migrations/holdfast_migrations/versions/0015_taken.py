"""An index on when checkpoints were taken, by which pages list them"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision: str = "0015"
down_revision: str | None = "0014"


def upgrade() -> None:
    taken_at = sa.text("(coalesce(snapshot_started_at, at))")
    op.create_index("ix_checkpoints_taken", "checkpoints", ["job", taken_at])


def downgrade() -> None:
    op.drop_index("ix_checkpoints_taken", table_name="checkpoints")
