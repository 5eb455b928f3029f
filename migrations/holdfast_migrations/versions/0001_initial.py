"""All tables.

Until the first release no database of an earlier shape exists: the models are the only definition of the tables.
When a second revision follows, this one becomes a literal list of tables, which later models do not change.
"""

from __future__ import annotations

import time

from alembic import op

from holdfast_server import models

revision: str = "0001"
down_revision: str | None = None

REFUSAL = "the audit log is append-only"


def upgrade() -> None:
    models.Base.metadata.create_all(op.get_bind())
    _forbid_changes_of_audit()
    op.bulk_insert(
        models.table(models.ProjectRecord), [{"name": models.DEFAULT_PROJECT, "created_at": time.time()}]
    )
    op.bulk_insert(models.table(models.AuditHeadRecord), [{"one": 1, "id": 0, "digest": b""}])


def downgrade() -> None:
    models.Base.metadata.drop_all(op.get_bind())
    if op.get_bind().dialect.name != "sqlite":
        op.execute("DROP FUNCTION audit_is_append_only()")


def _forbid_changes_of_audit() -> None:
    if op.get_bind().dialect.name == "sqlite":
        for verb in ("UPDATE", "DELETE"):
            op.execute(
                f"CREATE TRIGGER audit_no_{verb.lower()} BEFORE {verb} ON audit "
                f"BEGIN SELECT RAISE(ABORT, '{REFUSAL}'); END"
            )
        # INSERT OR REPLACE deletes the old row without the trigger that forbids DELETE. On PostgreSQL,
        # ON CONFLICT DO UPDATE is an UPDATE, which is forbidden already.
        op.execute(
            "CREATE TRIGGER audit_no_replace BEFORE INSERT ON audit "
            "WHEN EXISTS (SELECT 1 FROM audit WHERE id = NEW.id) "
            "BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END"
        )
        return
    op.execute(
        "CREATE FUNCTION audit_is_append_only() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$ BEGIN RAISE EXCEPTION '{REFUSAL}'; END $$"
    )
    op.execute(
        "CREATE TRIGGER audit_no_change BEFORE UPDATE OR DELETE OR TRUNCATE ON audit "
        "FOR EACH STATEMENT EXECUTE FUNCTION audit_is_append_only()"
    )
