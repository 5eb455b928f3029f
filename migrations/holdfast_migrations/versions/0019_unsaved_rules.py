"""Rules for unsaved work have that name."""

from __future__ import annotations

from alembic import op

revision: str = "0019"
down_revision: str | None = "0018"


def upgrade() -> None:
    for table, columns in (("alert_rules", ("name", "kind")), ("alerts", ("rule", "kind"))):
        for column in columns:
            for unit in ("iterations", "gpu_hours"):
                op.execute(
                    f"UPDATE {table} SET {column} = 'unsaved_{unit}' WHERE {column} = 'exposure_{unit}'"  # noqa: S608
                )
