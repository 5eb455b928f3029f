"""Coarse roll-ups are stored once they are whole: those that were half filled go, finer ones say the same"""

from __future__ import annotations

from alembic import op

revision: str = "0017"
down_revision: str | None = "0016"


def upgrade() -> None:
    op.execute(
        "DELETE FROM rollups WHERE level > 6 AND EXISTS ("
        " SELECT 1 FROM stretches WHERE stretches.id = rollups.stretch"
        " AND rollups.bucket >= ((stretches.last_iteration + 1) >> CAST(rollups.level AS INTEGER))"
        # where the finer ones are gone, the coarse one is all there is
        " AND stretches.fine_from <= (rollups.bucket << CAST(rollups.level AS INTEGER)))"
    )


def downgrade() -> None:
    """What went is in the finer ones, which stay."""
