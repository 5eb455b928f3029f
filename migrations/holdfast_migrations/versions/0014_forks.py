"""Rules of retention ordered by hand, where a job was forked from, and how a script is taken back"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision: str = "0014"
down_revision: str | None = "0013"

_ADDED: tuple[tuple[str, str, sa.types.TypeEngine[Any]], ...] = (
    ("jobs", "retention", sa.String()),
    ("attempts", "restore_mode", sa.String()),
    ("attempts", "restore_reason", sa.String()),
    ("attempts", "start_seconds", sa.Double()),
    ("lineages", "from_job", sa.String()),
    ("lineages", "from_checkpoint", sa.String()),
    ("lineages", "from_digest", sa.String()),
)


def upgrade() -> None:
    for table, column, kind in _ADDED:
        op.add_column(table, sa.Column(column, kind, nullable=True))
    op.create_index(
        "ix_lineages_from_job",
        "lineages",
        ["from_job"],
        sqlite_where=sa.text("from_job IS NOT NULL"),
        postgresql_where=sa.text("from_job IS NOT NULL"),
    )


def downgrade() -> None:
    op.drop_index("ix_lineages_from_job", table_name="lineages")
    for table, column, _ in reversed(_ADDED):
        op.drop_column(table, column)
