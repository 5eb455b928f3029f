"""All tables."""

from __future__ import annotations

import time

import sqlalchemy as sa
from alembic import op

revision: str = "0001"
down_revision: str | None = None

NUMBER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
REFUSAL = "the audit log is append-only"


def upgrade() -> None:
    _create_projects()
    _create_accounts()
    _create_audit()
    _create_jobs()
    _create_samples()
    _create_events()
    _create_control()
    _create_alerts()


def downgrade() -> None:
    for table in (
        "alert_deliveries",
        "alert_channels",
        "alerts",
        "alert_rules",
        "settings_versions",
        "order_transitions",
        "orders",
        "pacings",
        "notices",
        "stalls",
        "verifications",
        "checkpoints",
        "work",
        "gaps",
        "rollups",
        "chunks",
        "stretches",
        "batches",
        "lineages",
        "attempts",
        "jobs",
        "audit_head",
        "audit",
        "allowances",
        "handshakes",
        "links",
        "tokens",
        "shared_sessions",
        "sign_ins",
        "memberships",
        "people",
        "retentions",
        "projects",
    ):
        op.drop_table(table)
    if op.get_bind().dialect.name != "sqlite":
        op.execute("DROP FUNCTION audit_is_append_only()")


def _create_projects() -> None:
    """Projects, and how long they keep what is stored."""
    projects = op.create_table(
        "projects",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_projects")),
    )
    op.bulk_insert(projects, [{"name": "default", "created_at": time.time()}])
    op.create_table(
        "retentions",
        sa.Column("project", sa.String(), nullable=False),
        sa.Column("samples_seconds", sa.Double(), nullable=True),
        sa.Column("fine_seconds", sa.Double(), nullable=True),
        sa.Column("reports_seconds", sa.Double(), nullable=True),
        sa.Column("samples_bytes", NUMBER, nullable=True),
        sa.ForeignKeyConstraint(["project"], ["projects.name"], name=op.f("fk_retentions_project_projects")),
        sa.PrimaryKeyConstraint("project", name=op.f("pk_retentions")),
    )


def _create_accounts() -> None:
    """People, roles, sessions, keys, links and rate limits."""
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
        sa.ForeignKeyConstraint(
            ["person"], ["people.name"], name=op.f("fk_memberships_person_people"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(
            ["project"], ["projects.name"], name=op.f("fk_memberships_project_projects"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("person", "project", name=op.f("pk_memberships")),
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
        sa.ForeignKeyConstraint(
            ["person"], ["people.name"], name=op.f("fk_sign_ins_person_people"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_sign_ins")),
        sa.UniqueConstraint("id", name=op.f("uq_sign_ins_id")),
    )
    op.create_index(op.f("ix_sign_ins_person"), "sign_ins", ["person"])
    op.create_table(
        "shared_sessions",
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_shared_sessions")),
    )
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
        sa.ForeignKeyConstraint(["project"], ["projects.name"], name=op.f("fk_tokens_project_projects")),
        sa.PrimaryKeyConstraint("prefix", name=op.f("pk_tokens")),
    )
    op.create_index(op.f("ix_tokens_project"), "tokens", ["project"])
    op.create_table(
        "links",
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.Column("person", sa.String(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["person"], ["people.name"], name=op.f("fk_links_person_people"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_links")),
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


def _create_audit() -> None:
    """The audit log: append-only, each row sealed by the one before."""
    op.create_table(
        "audit",
        sa.Column("id", NUMBER, autoincrement=False, nullable=False),
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
    op.create_index(op.f("ix_audit_job_id"), "audit", ["job", "id"])
    op.create_index(op.f("ix_audit_project_id"), "audit", ["project", "id"])
    op.create_index(op.f("ix_audit_who_id"), "audit", ["who", "id"])
    head = op.create_table(
        "audit_head",
        sa.Column("one", NUMBER, autoincrement=False, nullable=False),
        sa.Column("id", NUMBER, nullable=False),
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("one", name=op.f("pk_audit_head")),
    )
    op.bulk_insert(head, [{"one": 1, "id": 0, "digest": b""}])
    _forbid_changes_of_audit()


def _create_jobs() -> None:
    """Jobs with their attempts, lineages and received batches."""
    op.create_table(
        "jobs",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("project", sa.String(), server_default="default", nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("last_contact_at", sa.Double(), nullable=False),
        sa.Column("progressed_at", sa.Double(), nullable=True),
        sa.Column("uid", sa.String(), nullable=False),
        sa.Column("attempt", NUMBER, nullable=False),
        sa.Column("sequence", NUMBER, nullable=False),
        sa.Column("samples_sequence", NUMBER, server_default=sa.text("-1"), nullable=False),
        sa.Column("iteration", NUMBER, nullable=False),
        sa.Column("lineage", NUMBER, nullable=False),
        sa.Column("latest_lineage", NUMBER, nullable=False),
        sa.Column("recent", sa.LargeBinary(), nullable=False),
        sa.Column("longest_seconds", sa.Double(), server_default=sa.text("0"), nullable=False),
        sa.Column("paced", sa.LargeBinary(), nullable=False),
        sa.Column("version", NUMBER, nullable=False),
        sa.Column("budget", sa.Double(), nullable=True),
        sa.Column("policy", sa.String(), nullable=True),
        sa.Column("every", NUMBER, nullable=True),
        sa.Column("every_until", sa.Double(), nullable=True),
        sa.Column("retention", sa.String(), nullable=True),
        sa.Column("paused", sa.Boolean(), nullable=False),
        sa.Column("paused_version", NUMBER, nullable=False),
        sa.Column("checkpoint_request", NUMBER, nullable=False),
        sa.Column("probe_request", NUMBER, server_default=sa.text("0"), nullable=False),
        sa.Column("pins_known", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("delivered_version", NUMBER, server_default=sa.text("0"), nullable=False),
        sa.Column("applied_version", NUMBER, nullable=False),
        sa.Column("applied_iteration", NUMBER, nullable=True),
        sa.Column("applied_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["project"], ["projects.name"], name=op.f("fk_jobs_project_projects")),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_jobs")),
    )
    op.create_index(
        op.f("ix_jobs_every_until"),
        "jobs",
        ["every_until"],
        sqlite_where=sa.text("every_until IS NOT NULL"),
        postgresql_where=sa.text("every_until IS NOT NULL"),
    )
    op.create_index(op.f("ix_jobs_last_contact_at"), "jobs", ["last_contact_at"])
    op.create_index(op.f("ix_jobs_project"), "jobs", ["project"])
    op.create_index(
        "ix_jobs_standing",
        "jobs",
        [
            "project",
            "name",
            "uid",
            "last_contact_at",
            "longest_seconds",
            "paused",
            "paused_version",
            "applied_version",
            "iteration",
        ],
    )
    op.create_table(
        "attempts",
        sa.Column("job", sa.String(), nullable=False),
        sa.Column("uid", sa.String(), nullable=False),
        sa.Column("attempt", NUMBER, nullable=False),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("iteration", NUMBER, nullable=False),
        sa.Column("lineage", NUMBER, nullable=False),
        sa.Column("last_iteration", NUMBER, nullable=False),
        sa.Column("iterations", NUMBER, nullable=False),
        sa.Column("resumed_from", sa.String(), nullable=True),
        sa.Column("host", sa.String(), nullable=False),
        sa.Column("pid", NUMBER, nullable=False),
        sa.Column("world_size", NUMBER, nullable=False),
        sa.Column("supervised", sa.Boolean(), nullable=False),
        sa.Column("previous_exit", sa.String(), nullable=True),
        sa.Column("versions", sa.LargeBinary(), nullable=False),
        sa.Column("owner", sa.String(), nullable=True),
        sa.Column("labels", sa.LargeBinary(), nullable=True),
        sa.Column("finished_at", sa.Double(), nullable=True),
        sa.Column("finished", sa.String(), nullable=True),
        sa.Column("restore_mode", sa.String(), nullable=True),
        sa.Column("restore_reason", sa.String(), nullable=True),
        sa.Column("start_seconds", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["job"], ["jobs.name"], name=op.f("fk_attempts_job_jobs")),
        sa.PrimaryKeyConstraint("job", "uid", name=op.f("pk_attempts")),
    )
    op.create_index(op.f("ix_attempts_job_started_at"), "attempts", ["job", "started_at"])
    op.create_table(
        "lineages",
        sa.Column("job", sa.String(), nullable=False),
        sa.Column("lineage", NUMBER, autoincrement=False, nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("iteration", NUMBER, nullable=False),
        sa.Column("parent", sa.String(), nullable=True),
        sa.Column("order_id", sa.String(), nullable=True),
        sa.Column("last_iteration", NUMBER, nullable=False),
        sa.Column("from_job", sa.String(), nullable=True),
        sa.Column("from_checkpoint", sa.String(), nullable=True),
        sa.Column("from_digest", sa.String(), nullable=True),
        sa.ForeignKeyConstraint(["job"], ["jobs.name"], name=op.f("fk_lineages_job_jobs")),
        sa.PrimaryKeyConstraint("job", "lineage", name=op.f("pk_lineages")),
    )
    op.create_index(
        op.f("ix_lineages_from_job"),
        "lineages",
        ["from_job"],
        sqlite_where=sa.text("from_job IS NOT NULL"),
        postgresql_where=sa.text("from_job IS NOT NULL"),
    )
    op.create_table(
        "batches",
        sa.Column("job", sa.String(), nullable=False),
        sa.Column("uid", sa.String(), nullable=False),
        sa.Column("rank", NUMBER, autoincrement=False, nullable=False),
        sa.Column("lane", sa.String(), server_default="control", nullable=False),
        sa.Column("sequence", NUMBER, autoincrement=False, nullable=False),
        sa.Column("received_at", sa.Double(), nullable=False),
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.Column("all_before", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(["job"], ["jobs.name"], name=op.f("fk_batches_job_jobs")),
        sa.PrimaryKeyConstraint("job", "uid", "rank", "lane", "sequence", name=op.f("pk_batches")),
    )


def _create_samples() -> None:
    """Samples per iteration as compressed columns, with roll-ups and totals."""
    op.create_table(
        "stretches",
        sa.Column("id", NUMBER, nullable=False),
        sa.Column("job", sa.String(), nullable=False),
        sa.Column("uid", sa.String(), nullable=False),
        sa.Column("attempt", NUMBER, nullable=False),
        sa.Column("rank", NUMBER, nullable=False),
        sa.Column("lineage", NUMBER, nullable=False),
        sa.Column("metrics", sa.LargeBinary(), nullable=False),
        sa.Column("first_iteration", NUMBER, nullable=False),
        sa.Column("last_iteration", NUMBER, nullable=False),
        sa.Column("last_at", sa.Double(), nullable=False),
        sa.Column("rows", NUMBER, nullable=False),
        sa.Column("chunks", NUMBER, nullable=False),
        sa.Column("chunk_bytes", NUMBER, nullable=False),
        sa.Column("widest", NUMBER, nullable=False),
        sa.Column("whole_from", NUMBER, server_default=sa.text("0"), nullable=False),
        sa.Column("fine_from", NUMBER, server_default=sa.text("0"), nullable=False),
        sa.ForeignKeyConstraint(["job"], ["jobs.name"], name=op.f("fk_stretches_job_jobs")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_stretches")),
        sa.UniqueConstraint("job", "rank", "lineage", "uid", name=op.f("uq_stretches_job_rank_lineage_uid")),
    )
    op.create_index(op.f("ix_stretches_last_at"), "stretches", ["last_at"])
    op.create_table(
        "chunks",
        sa.Column("id", NUMBER, nullable=False),
        sa.Column("job", sa.String(), nullable=False),
        sa.Column("uid", sa.String(), nullable=False),
        sa.Column("attempt", NUMBER, nullable=False),
        sa.Column("rank", NUMBER, nullable=False),
        sa.Column("sequence", NUMBER, nullable=False),
        sa.Column("lineage", NUMBER, nullable=False),
        sa.Column("first_iteration", NUMBER, nullable=False),
        sa.Column("last_iteration", NUMBER, nullable=False),
        sa.Column("first_at", sa.Double(), nullable=False),
        sa.Column("last_at", sa.Double(), nullable=False),
        sa.Column("rows", NUMBER, nullable=False),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.Column("columns", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["job"], ["jobs.name"], name=op.f("fk_chunks_job_jobs")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_chunks")),
    )
    op.create_index(
        op.f("ix_chunks_job_rank_lineage_first_iteration"), "chunks", ["job", "rank", "lineage", "first_iteration"]
    )
    op.create_table(
        "rollups",
        sa.Column("stretch", NUMBER, autoincrement=False, nullable=False),
        sa.Column("level", NUMBER, autoincrement=False, nullable=False),
        sa.Column("bucket", NUMBER, autoincrement=False, nullable=False),
        sa.Column("first_iteration", NUMBER, nullable=False),
        sa.Column("last_iteration", NUMBER, nullable=False),
        sa.Column("rows", NUMBER, nullable=False),
        sa.Column("columns", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["stretch"], ["stretches.id"], name=op.f("fk_rollups_stretch_stretches")),
        sa.PrimaryKeyConstraint("stretch", "level", "bucket", name=op.f("pk_rollups")),
    )
    op.create_table(
        "gaps",
        sa.Column("id", NUMBER, nullable=False),
        sa.Column("job", sa.String(), nullable=False),
        sa.Column("uid", sa.String(), nullable=False),
        sa.Column("rank", NUMBER, nullable=False),
        sa.Column("lineage", NUMBER, nullable=False),
        sa.Column("first_iteration", NUMBER, nullable=False),
        sa.Column("last_iteration", NUMBER, nullable=False),
        sa.Column("dropped", NUMBER, nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["job"], ["jobs.name"], name=op.f("fk_gaps_job_jobs")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_gaps")),
    )
    op.create_index(op.f("ix_gaps_job_first_iteration"), "gaps", ["job", "first_iteration"])
    op.create_table(
        "work",
        sa.Column("job", sa.String(), nullable=False),
        sa.Column("rank", NUMBER, autoincrement=False, nullable=False),
        sa.Column("bucket", NUMBER, autoincrement=False, nullable=False),
        sa.Column("uid", sa.String(), nullable=False),
        sa.Column("lineage", NUMBER, autoincrement=False, nullable=False),
        sa.Column("first_iteration", NUMBER, nullable=False),
        sa.Column("last_iteration", NUMBER, nullable=False),
        sa.Column("begins_at", sa.Double(), nullable=False),
        sa.Column("ends_at", sa.Double(), nullable=False),
        sa.Column("iterations", NUMBER, nullable=False),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.Column("longest_seconds", sa.Double(), nullable=False),
        sa.Column("stall_seconds", sa.Double(), nullable=False),
        sa.Column("data_seconds", sa.Double(), nullable=False),
        sa.Column("barrier_iterations", NUMBER, nullable=False),
        sa.Column("barrier_seconds", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["job"], ["jobs.name"], name=op.f("fk_work_job_jobs")),
        sa.PrimaryKeyConstraint("job", "rank", "bucket", "uid", "lineage", name=op.f("pk_work")),
    )
    op.create_index(op.f("ix_work_job_bucket"), "work", ["job", "bucket"])


def _create_events() -> None:
    """What agents report now and then."""
    op.create_table(
        "checkpoints",
        sa.Column("job", sa.String(), nullable=False),
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("iteration", NUMBER, nullable=False),
        sa.Column("lineage", NUMBER, nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("payload_bytes", NUMBER, nullable=False),
        sa.Column("snapshot_started_at", sa.Double(), nullable=True),
        sa.Column("snapshot_seconds", sa.Double(), nullable=True),
        sa.Column("stall_seconds", sa.Double(), nullable=True),
        sa.Column("persist_started_at", sa.Double(), nullable=True),
        sa.Column("persist_seconds", sa.Double(), nullable=True),
        sa.Column("durable_iteration", NUMBER, nullable=True),
        sa.Column("reason", sa.String(), nullable=True),
        sa.Column("store_free_bytes", NUMBER, nullable=True),
        sa.Column("ranks", sa.LargeBinary(), nullable=True),
        sa.Column("label", sa.String(), nullable=True),
        sa.Column("pinned_by", sa.String(), nullable=True),
        sa.Column("pinned_at", sa.Double(), nullable=True),
        sa.Column("attempt", NUMBER, nullable=False),
        sa.Column("sequence", NUMBER, nullable=False),
        sa.ForeignKeyConstraint(["job"], ["jobs.name"], name=op.f("fk_checkpoints_job_jobs")),
        sa.PrimaryKeyConstraint("job", "id", name=op.f("pk_checkpoints")),
    )
    op.create_index(op.f("ix_checkpoints_job_state_iteration"), "checkpoints", ["job", "state", "iteration"])
    taken_at = sa.text("(coalesce(snapshot_started_at, at))")
    op.create_index("ix_checkpoints_taken", "checkpoints", ["job", taken_at])
    op.create_index(
        "ix_checkpoints_pinned",
        "checkpoints",
        ["job", "id"],
        sqlite_where=sa.text("pinned_at IS NOT NULL"),
        postgresql_where=sa.text("pinned_at IS NOT NULL"),
    )
    op.create_table(
        "verifications",
        sa.Column("job", sa.String(), nullable=False),
        sa.Column("checkpoint", sa.String(), nullable=False),
        sa.Column("request", NUMBER, nullable=False),
        sa.Column("against", sa.String(), nullable=True),
        sa.Column("asked_by", sa.String(), nullable=False),
        sa.Column("asked_at", sa.Double(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("host", sa.String(), nullable=False),
        sa.Column("read_bytes", NUMBER, nullable=False),
        sa.Column("total_bytes", NUMBER, nullable=False),
        sa.Column("seconds", sa.Double(), nullable=True),
        sa.Column("reason", sa.String(), nullable=True),
        sa.Column("verdict", sa.String(), nullable=True),
        sa.Column("verified_at", sa.Double(), nullable=True),
        sa.Column("verified_host", sa.String(), nullable=False),
        sa.Column("tensors", sa.LargeBinary(), nullable=True),
        sa.Column("tensors_at", sa.Double(), nullable=True),
        sa.Column("tensors_against", sa.String(), nullable=True),
        sa.ForeignKeyConstraint(["job"], ["jobs.name"], name=op.f("fk_verifications_job_jobs")),
        sa.PrimaryKeyConstraint("job", "checkpoint", name=op.f("pk_verifications")),
    )
    op.create_table(
        "stalls",
        sa.Column("id", NUMBER, nullable=False),
        sa.Column("job", sa.String(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("iteration", NUMBER, nullable=False),
        sa.Column("lineage", NUMBER, nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["job"], ["jobs.name"], name=op.f("fk_stalls_job_jobs")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_stalls")),
    )
    op.create_index(op.f("ix_stalls_job_at"), "stalls", ["job", "at"])
    op.create_index(op.f("ix_stalls_job_iteration"), "stalls", ["job", "iteration"])
    op.create_index(op.f("ix_stalls_job_kind_at"), "stalls", ["job", "kind", "at"])
    op.create_table(
        "notices",
        sa.Column("id", NUMBER, nullable=False),
        sa.Column("job", sa.String(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("iteration", NUMBER, nullable=False),
        sa.Column("lineage", NUMBER, nullable=False),
        sa.Column("level", sa.String(), nullable=False),
        sa.Column("code", sa.String(), nullable=False),
        sa.Column("message", sa.String(), nullable=False),
        sa.ForeignKeyConstraint(["job"], ["jobs.name"], name=op.f("fk_notices_job_jobs")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_notices")),
    )
    op.create_index(op.f("ix_notices_job_id"), "notices", ["job", "id"])
    op.create_table(
        "pacings",
        sa.Column("id", NUMBER, nullable=False),
        sa.Column("job", sa.String(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("iteration", NUMBER, nullable=False),
        sa.Column("lineage", NUMBER, nullable=False),
        sa.Column("interval", NUMBER, nullable=True),
        sa.Column("budget", sa.Double(), nullable=False),
        sa.Column("measured_overhead", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["job"], ["jobs.name"], name=op.f("fk_pacings_job_jobs")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_pacings")),
    )
    op.create_index(op.f("ix_pacings_job_at"), "pacings", ["job", "at"])
    op.create_index(op.f("ix_pacings_job_iteration"), "pacings", ["job", "iteration"])


def _create_control() -> None:
    """What operators ask for."""
    op.create_table(
        "orders",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("job", sa.String(), nullable=False),
        sa.Column("key", sa.String(), nullable=False),
        sa.Column("checkpoint", sa.String(), nullable=False),
        sa.Column("iteration", NUMBER, nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("who", sa.String(), nullable=False),
        sa.Column("fence", NUMBER, nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=True),
        sa.Column("overruled", sa.String(), nullable=True),
        sa.Column("taken_by", NUMBER, nullable=True),
        sa.Column("from_iteration", NUMBER, nullable=False),
        sa.Column("from_lineage", NUMBER, nullable=False),
        sa.Column("new_lineage", NUMBER, nullable=True),
        sa.Column("reason", sa.String(), nullable=True),
        sa.Column("seconds", sa.Double(), nullable=True),
        sa.Column("safety_checkpoint", sa.String(), nullable=True),
        sa.ForeignKeyConstraint(["job"], ["jobs.name"], name=op.f("fk_orders_job_jobs")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_orders")),
        sa.UniqueConstraint("job", "key", name=op.f("uq_orders_job_key")),
    )
    op.create_index(op.f("ix_orders_job_created_at"), "orders", ["job", "created_at"])
    op.create_index(
        "uq_orders_open",
        "orders",
        ["job"],
        unique=True,
        sqlite_where=sa.text("state IN ('requested', 'delivered', 'restoring', 'unknown')"),
        postgresql_where=sa.text("state IN ('requested', 'delivered', 'restoring', 'unknown')"),
    )
    op.create_table(
        "order_transitions",
        sa.Column("id", NUMBER, nullable=False),
        sa.Column("order_id", sa.String(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("who", sa.String(), nullable=False),
        sa.Column("reason", sa.String(), nullable=True),
        sa.ForeignKeyConstraint(["order_id"], ["orders.id"], name=op.f("fk_order_transitions_order_id_orders")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_order_transitions")),
    )
    op.create_index(op.f("ix_order_transitions_order_id"), "order_transitions", ["order_id"])
    op.create_table(
        "settings_versions",
        sa.Column("job", sa.String(), nullable=False),
        sa.Column("version", NUMBER, autoincrement=False, nullable=False),
        sa.Column("who", sa.String(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("changes", sa.String(), nullable=False),
        sa.Column("applied_iteration", NUMBER, nullable=True),
        sa.Column("applied_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["job"], ["jobs.name"], name=op.f("fk_settings_versions_job_jobs")),
        sa.PrimaryKeyConstraint("job", "version", name=op.f("pk_settings_versions")),
    )


def _create_alerts() -> None:
    """Alert rules, incidents and deliveries."""
    op.create_table(
        "alert_rules",
        sa.Column("project", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("enabled", sa.Boolean(), nullable=False),
        sa.Column("severity", sa.String(), nullable=False),
        sa.Column("limit_value", sa.Double(), nullable=False),
        sa.Column("for_seconds", sa.Double(), nullable=False),
        sa.Column("jobs", sa.String(), nullable=False),
        sa.Column("changed_at", sa.Double(), nullable=False),
        sa.Column("changed_by", sa.String(), nullable=False),
        sa.ForeignKeyConstraint(["project"], ["projects.name"], name=op.f("fk_alert_rules_project_projects")),
        sa.PrimaryKeyConstraint("project", "name", name=op.f("pk_alert_rules")),
    )
    op.create_table(
        "alerts",
        sa.Column("id", NUMBER, nullable=False),
        sa.Column("project", sa.String(), nullable=False),
        sa.Column("job", sa.String(), nullable=False),
        sa.Column("rule", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("severity", sa.String(), nullable=False),
        sa.Column("subject", sa.String(), nullable=False),
        sa.Column("value", sa.Double(), nullable=True),
        sa.Column("message", sa.String(), nullable=False),
        sa.Column("since", sa.Double(), nullable=False),
        sa.Column("fired_at", sa.Double(), nullable=True),
        sa.Column("clear_since", sa.Double(), nullable=True),
        sa.Column("acknowledged_at", sa.Double(), nullable=True),
        sa.Column("acknowledged_by", sa.String(), nullable=True),
        sa.Column("silenced_until", sa.Double(), nullable=True),
        sa.Column("silenced_by", sa.String(), nullable=True),
        sa.Column("resolved_at", sa.Double(), nullable=True),
        sa.Column("resolved_why", sa.String(), nullable=True),
        sa.ForeignKeyConstraint(["job"], ["jobs.name"], name=op.f("fk_alerts_job_jobs")),
        sa.ForeignKeyConstraint(["project"], ["projects.name"], name=op.f("fk_alerts_project_projects")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_alerts")),
    )
    op.create_index(op.f("ix_alerts_job_id"), "alerts", ["job", "id"])
    op.create_index(op.f("ix_alerts_project_id"), "alerts", ["project", "id"])
    op.create_index(op.f("ix_alerts_resolved_at_id"), "alerts", ["resolved_at", "id"])
    op.create_index(
        "uq_alerts_open",
        "alerts",
        ["job", "rule"],
        unique=True,
        sqlite_where=sa.text("resolved_at IS NULL"),
        postgresql_where=sa.text("resolved_at IS NULL"),
    )
    op.create_table(
        "alert_channels",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("project", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("target", sa.String(), nullable=False),
        sa.Column("secret", sa.String(), nullable=False),
        sa.Column("least_severity", sa.String(), nullable=False),
        sa.Column("enabled", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("created_by", sa.String(), nullable=False),
        sa.ForeignKeyConstraint(["project"], ["projects.name"], name=op.f("fk_alert_channels_project_projects")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_alert_channels")),
    )
    op.create_index(op.f("ix_alert_channels_project"), "alert_channels", ["project"])
    op.create_table(
        "alert_deliveries",
        sa.Column("id", NUMBER, nullable=False),
        sa.Column("channel", sa.String(), nullable=False),
        sa.Column("alert", NUMBER, nullable=True),
        sa.Column("event", sa.String(), nullable=False),
        sa.Column("payload", sa.LargeBinary(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("tries", NUMBER, nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("next_at", sa.Double(), nullable=False),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("error", sa.String(), nullable=True),
        sa.ForeignKeyConstraint(["alert"], ["alerts.id"], name=op.f("fk_alert_deliveries_alert_alerts")),
        sa.ForeignKeyConstraint(
            ["channel"],
            ["alert_channels.id"],
            name=op.f("fk_alert_deliveries_channel_alert_channels"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_alert_deliveries")),
    )
    op.create_index(op.f("ix_alert_deliveries_alert"), "alert_deliveries", ["alert"])
    op.create_index(op.f("ix_alert_deliveries_channel_id"), "alert_deliveries", ["channel", "id"])
    op.create_index(
        "ix_alert_deliveries_due",
        "alert_deliveries",
        ["next_at"],
        sqlite_where=sa.text("state = 'waiting'"),
        postgresql_where=sa.text("state = 'waiting'"),
    )


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
