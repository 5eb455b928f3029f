"""Browsers signed in with the shared secret, and no row of the audit log replaced by another"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision: str = "0018"
down_revision: str | None = "0017"


def upgrade() -> None:
    op.create_table(
        "shared_sessions",
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_shared_sessions")),
    )
    if op.get_bind().dialect.name == "sqlite":
        # INSERT OR REPLACE deletes the old row without the trigger that forbids DELETE. On PostgreSQL,
        # ON CONFLICT DO UPDATE is an UPDATE, which is forbidden already.
        op.execute(
            "CREATE TRIGGER audit_no_replace BEFORE INSERT ON audit "
            "WHEN EXISTS (SELECT 1 FROM audit WHERE id = NEW.id) "
            "BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END"
        )


def downgrade() -> None:
    if op.get_bind().dialect.name == "sqlite":
        op.execute("DROP TRIGGER audit_no_replace")
    op.drop_table("shared_sessions")
