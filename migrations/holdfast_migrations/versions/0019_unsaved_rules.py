"""Rules for unsaved work have that name."""

from __future__ import annotations

from alembic import op

revision: str = "0019"
down_revision: str | None = "0018"


def upgrade() -> None:
    for table, name, owner in (("alert_rules", "name", "project"), ("alerts", "rule", "job")):
        for unit in ("iterations", "gpu_hours"):
            old, new = f"exposure_{unit}", f"unsaved_{unit}"
            op.execute(f"UPDATE {table} SET kind = '{new}' WHERE kind = '{old}'")  # noqa: S608
            op.execute(
                f"UPDATE {table} SET {name} = '{new}' WHERE {name} = '{old}' AND NOT EXISTS "  # noqa: S608
                f"(SELECT 1 FROM {table} other WHERE other.{owner} = {table}.{owner} AND other.{name} = '{new}')"
            )
