"""People, keys and the audit log"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision: str = "0005"
down_revision: str | None = "0004"

_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_REFUSAL = "the audit log is append-only"


def upgrade() -> None:
    op.create_table(
        "people",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("password", sa.String(), nullable=True),
        sa.Column("admin", sa.Boolean(), nullable=False),
        sa.Column("issuer", sa.String(), nullable=True),
        sa.Column("subject", sa.String(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("signed_in_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_people")),
        sa.UniqueConstraint("issuer", "subject", name=op.f("uq_people_issuer_subject")),
    )
    op.create_table(
        "memberships",
        sa.Column("person", sa.String(), nullable=False),
        sa.Column("project", sa.String(), nullable=False),
        sa.Column("role", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("person", "project", name=op.f("pk_memberships")),
        sa.ForeignKeyConstraint(
            ["person"], ["people.name"], name=op.f("fk_memberships_person_people"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(
            ["project"], ["projects.name"], name=op.f("fk_memberships_project_projects"), ondelete="CASCADE"
        ),
    )
    op.create_index(op.f("ix_memberships_project"), "memberships", ["project"])
    op.create_table(
        "sign_ins",
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("person", sa.String(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("seen_at", sa.Double(), nullable=False),
        sa.Column("address", sa.String(), nullable=False),
        sa.Column("browser", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_sign_ins")),
        sa.UniqueConstraint("id", name=op.f("uq_sign_ins_id")),
        sa.ForeignKeyConstraint(
            ["person"], ["people.name"], name=op.f("fk_sign_ins_person_people"), ondelete="CASCADE"
        ),
    )
    op.create_index(op.f("ix_sign_ins_person"), "sign_ins", ["person"])
    op.create_table(
        "tokens",
        sa.Column("prefix", sa.String(), nullable=False),
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("scopes", sa.String(), nullable=False),
        sa.Column("project", sa.String(), nullable=True),
        sa.Column("job", sa.String(), nullable=True),
        sa.Column("created_by", sa.String(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=True),
        sa.Column("last_used_at", sa.Double(), nullable=True),
        sa.Column("revoked_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("prefix", name=op.f("pk_tokens")),
        sa.ForeignKeyConstraint(["project"], ["projects.name"], name=op.f("fk_tokens_project_projects")),
    )
    op.create_index(op.f("ix_tokens_project"), "tokens", ["project"])
    op.create_table(
        "links",
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.Column("person", sa.String(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_links")),
        sa.ForeignKeyConstraint(
            ["person"], ["people.name"], name=op.f("fk_links_person_people"), ondelete="CASCADE"
        ),
    )
    op.create_index(op.f("ix_links_person"), "links", ["person"])
    op.create_table(
        "handshakes",
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.Column("nonce", sa.String(), nullable=False),
        sa.Column("verifier", sa.String(), nullable=False),
        sa.Column("then", sa.String(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_handshakes")),
    )
    op.create_index(op.f("ix_handshakes_expires_at"), "handshakes", ["expires_at"])
    op.create_table(
        "allowances",
        sa.Column("key", sa.LargeBinary(), nullable=False),
        sa.Column("full_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("key", name=op.f("pk_allowances")),
    )
    op.create_index(op.f("ix_allowances_full_at"), "allowances", ["full_at"])
    _audit()


def _audit() -> None:
    op.create_table(
        "audit",
        sa.Column("id", _ID, autoincrement=False, nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("who", sa.String(), nullable=False),
        sa.Column("action", sa.String(), nullable=False),
        sa.Column("job", sa.String(), nullable=True),
        sa.Column("project", sa.String(), nullable=True),
        sa.Column("before", sa.String(), nullable=True),
        sa.Column("after", sa.String(), nullable=True),
        sa.Column("request_id", sa.String(), nullable=False),
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_audit")),
    )
    for column in ("job", "project", "who"):
        op.create_index(op.f(f"ix_audit_{column}_id"), "audit", [column, "id"])
    head = op.create_table(
        "audit_head",
        sa.Column("one", _ID, autoincrement=False, nullable=False),
        sa.Column("id", _ID, nullable=False),
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("one", name=op.f("pk_audit_head")),
    )
    op.bulk_insert(head, [{"one": 1, "id": 0, "digest": b""}])
    _forbid_changes()


def _forbid_changes() -> None:
    if op.get_bind().dialect.name == "sqlite":
        for verb in ("UPDATE", "DELETE"):
            op.execute(
                f"CREATE TRIGGER audit_no_{verb.lower()} BEFORE {verb} ON audit "
                f"BEGIN SELECT RAISE(ABORT, '{_REFUSAL}'); END"
            )
        return
    op.execute(
        "CREATE FUNCTION audit_is_append_only() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$ BEGIN RAISE EXCEPTION '{_REFUSAL}'; END $$"
    )
    op.execute(
        "CREATE TRIGGER audit_no_change BEFORE UPDATE OR DELETE OR TRUNCATE ON audit "
        "FOR EACH STATEMENT EXECUTE FUNCTION audit_is_append_only()"
    )


def downgrade() -> None:
    for table in (
        "audit_head",
        "audit",
        "allowances",
        "handshakes",
        "links",
        "tokens",
        "sign_ins",
        "memberships",
        "people",
    ):
        op.drop_table(table)
    if op.get_bind().dialect.name != "sqlite":
        op.execute("DROP FUNCTION audit_is_append_only()")
