"""The tables of the first version, listed literally: later revisions change them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal

import sqlalchemy as sa
from alembic import op

revision: str = "0001"
down_revision: str | None = None

REFUSAL = "the audit log is append-only"
_Columns = Sequence[str | sa.TextClause]


def upgrade() -> None:
    _create_jobs()
    _create_attempts()
    _create_people()
    _create_access()
    _create_checkpoints()
    _create_reports()
    _create_samples()
    _create_alerts()
    _forbid_changes_of_audit()
    projects = sa.table("projects", sa.column("name"), sa.column("created_at"))
    op.bulk_insert(projects, [{"name": "default", "created_at": time.time()}])
    audit_head = sa.table("audit_head", sa.column("one"), sa.column("id"), sa.column("digest", sa.LargeBinary()))
    op.bulk_insert(audit_head, [{"one": 1, "id": 0, "digest": b""}])


def _text(name: str, *, null: bool = False, default: str | None = None) -> sa.Column[str]:
    return sa.Column(name, sa.String(), nullable=null, server_default=default)


def _real(name: str, *, null: bool = False, default: sa.TextClause | None = None) -> sa.Column[float]:
    return sa.Column(name, sa.Double(), nullable=null, server_default=default)


def _blob(name: str, *, null: bool = False) -> sa.Column[bytes]:
    return sa.Column(name, sa.LargeBinary(), nullable=null)


def _boolean(name: str, *, default: sa.TextClause | None = None) -> sa.Column[bool]:
    return sa.Column(name, sa.Boolean(), nullable=False, server_default=default)


def _integer(
    name: str, *, null: bool = False, default: sa.TextClause | None = None, autoincrement: bool = True
) -> sa.Column[int]:
    # SQLite's integers hold 64 bits anyway, and only INTEGER counts up by itself.
    number = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    counts: Literal["auto", False] = "auto" if autoincrement else False
    return sa.Column(name, number, nullable=null, server_default=default, autoincrement=counts)


def _refers(table: str, column: str, target: str, *, cascade: bool = False) -> sa.ForeignKeyConstraint:
    name = f"fk_{table}_{column}_{target.partition('.')[0]}"
    return sa.ForeignKeyConstraint([column], [target], name=name, ondelete="CASCADE" if cascade else None)


def _index(name: str, table: str, columns: _Columns, *, unique: bool = False, where: str | None = None) -> None:
    condition = None if where is None else sa.text(where)
    op.create_index(name, table, columns, unique=unique, sqlite_where=condition, postgresql_where=condition)


def _create_jobs() -> None:
    op.create_table(
        "projects",
        _text("name"), _real("created_at"),
        sa.PrimaryKeyConstraint("name", name="pk_projects"),
    )  # fmt: skip
    op.create_table(
        "jobs",
        _text("name"), _text("project", default="default"), _real("created_at"), _real("last_contact_at"),
        _real("progressed_at", null=True), _text("uid"), _integer("attempt"), _integer("sequence"),
        _integer("samples_sequence", default=sa.text("-1")), _integer("iteration"), _integer("lineage"),
        _integer("latest_lineage"), _blob("recent"), _real("longest_seconds", default=sa.text("0")),
        _blob("paced"), _integer("version"), _real("budget", null=True), _text("policy", null=True),
        _integer("every", null=True), _real("interval_seconds", null=True), _real("every_until", null=True),
        _text("retention", null=True), _boolean("paused"), _integer("paused_version"),
        _integer("checkpoint_request"), _integer("probe_request", default=sa.text("0")),
        _boolean("pins_known", default=sa.text("false")), _integer("delivered_version", default=sa.text("0")),
        _integer("applied_version"), _integer("applied_iteration", null=True), _real("applied_at", null=True),
        _refers("jobs", "project", "projects.name"),
        sa.PrimaryKeyConstraint("name", name="pk_jobs"),
    )  # fmt: skip
    _index("ix_jobs_every_until", "jobs", ["every_until"], where="every_until IS NOT NULL")
    _index("ix_jobs_last_contact_at", "jobs", ["last_contact_at"])
    _index("ix_jobs_project", "jobs", ["project"])
    _index("ix_jobs_standing", "jobs", [
        "project", "name", "uid", "last_contact_at", "longest_seconds",
        "paused", "paused_version", "applied_version", "iteration",
    ])  # fmt: skip


def _create_attempts() -> None:
    op.create_table(
        "attempt_configurations",
        _text("job"), _text("uid"), _text("section"), _blob("contents"),
        _refers("attempt_configurations", "job", "jobs.name"),
        sa.PrimaryKeyConstraint("job", "uid", "section", name="pk_attempt_configurations"),
    )  # fmt: skip
    op.create_table(
        "attempt_output",
        _text("job"), _text("uid"), _integer("first", autoincrement=False), _integer("end"),
        _blob("contents"),
        _refers("attempt_output", "job", "jobs.name"),
        sa.PrimaryKeyConstraint("job", "uid", "first", name="pk_attempt_output"),
    )  # fmt: skip
    op.create_table(
        "attempts",
        _text("job"), _text("uid"), _integer("attempt"), _real("started_at"), _integer("iteration"),
        _integer("lineage"), _integer("last_iteration"), _integer("iterations"),
        _text("resumed_from", null=True), _text("host"), _integer("pid"), _integer("world_size"),
        _boolean("supervised"), _text("previous_exit", null=True), _blob("versions"),
        _text("owner", null=True), _text("labels", null=True), _real("finished_at", null=True),
        _text("finished", null=True), _text("restore_mode", null=True), _text("restore_reason", null=True),
        _real("start_seconds", null=True),
        _refers("attempts", "job", "jobs.name"),
        sa.PrimaryKeyConstraint("job", "uid", name="pk_attempts"),
    )  # fmt: skip
    _index("ix_attempts_job_started_at", "attempts", ["job", "started_at"])
    op.create_table(
        "lineages",
        _text("job"), _integer("lineage", autoincrement=False), _real("at"), _integer("iteration"),
        _text("parent", null=True), _text("order_id", null=True), _integer("last_iteration"),
        _text("from_job", null=True), _text("from_checkpoint", null=True), _text("from_digest", null=True),
        _refers("lineages", "job", "jobs.name"),
        sa.PrimaryKeyConstraint("job", "lineage", name="pk_lineages"),
    )  # fmt: skip
    _index("ix_lineages_from_job", "lineages", ["from_job"], where="from_job IS NOT NULL")
    op.create_table(
        "settings_versions",
        _text("job"), _integer("version", autoincrement=False), _text("who"), _real("at"), _text("changes"),
        _integer("applied_iteration", null=True), _real("applied_at", null=True),
        _refers("settings_versions", "job", "jobs.name"),
        sa.PrimaryKeyConstraint("job", "version", name="pk_settings_versions"),
    )  # fmt: skip


def _create_people() -> None:
    op.create_table(
        "audit",
        _integer("id", autoincrement=False), _real("at"), _text("who"), _text("action"),
        _text("job", null=True), _text("project", null=True), _text("before", null=True),
        _text("after", null=True), _text("request_id"), _blob("digest"),
        sa.PrimaryKeyConstraint("id", name="pk_audit"),
    )  # fmt: skip
    _index("ix_audit_job_id", "audit", ["job", "id"])
    _index("ix_audit_project_id", "audit", ["project", "id"])
    _index("ix_audit_who_id", "audit", ["who", "id"])
    op.create_table(
        "audit_head",
        _integer("one", autoincrement=False), _integer("id"), _blob("digest"),
        sa.PrimaryKeyConstraint("one", name="pk_audit_head"),
    )  # fmt: skip
    op.create_table(
        "oidc_flows",
        _blob("digest"), _text("nonce"), _text("verifier"), _text("then"), _real("expires_at"),
        sa.PrimaryKeyConstraint("digest", name="pk_oidc_flows"),
    )  # fmt: skip
    _index("ix_oidc_flows_expires_at", "oidc_flows", ["expires_at"])
    op.create_table(
        "people",
        _text("name"), _text("password", null=True), _boolean("admin"), _text("issuer", null=True),
        _text("subject", null=True), _real("created_at"), _real("signed_in_at", null=True),
        sa.PrimaryKeyConstraint("name", name="pk_people"),
        sa.UniqueConstraint("issuer", "subject", name="uq_people_issuer_subject"),
    )  # fmt: skip
    op.create_table(
        "rate_limits",
        _blob("key"), _real("full_at"),
        sa.PrimaryKeyConstraint("key", name="pk_rate_limits"),
    )  # fmt: skip
    _index("ix_rate_limits_full_at", "rate_limits", ["full_at"])
    op.create_table(
        "shared_sessions",
        _blob("digest"), _real("expires_at"),
        sa.PrimaryKeyConstraint("digest", name="pk_shared_sessions"),
    )  # fmt: skip


def _create_access() -> None:
    op.create_table(
        "memberships",
        _text("person"), _text("project"), _text("role"),
        _refers("memberships", "person", "people.name", cascade=True),
        _refers("memberships", "project", "projects.name", cascade=True),
        sa.PrimaryKeyConstraint("person", "project", name="pk_memberships"),
    )  # fmt: skip
    _index("ix_memberships_project", "memberships", ["project"])
    op.create_table(
        "one_time_links",
        _blob("digest"), _text("person", null=True), _real("created_at"), _real("expires_at"),
        _refers("one_time_links", "person", "people.name", cascade=True),
        sa.PrimaryKeyConstraint("digest", name="pk_one_time_links"),
    )  # fmt: skip
    _index("ix_one_time_links_person", "one_time_links", ["person"])
    op.create_table(
        "sign_ins",
        _blob("digest"), _text("id"), _text("person"), _real("created_at"), _real("seen_at"),
        _text("address"), _text("browser"),
        _refers("sign_ins", "person", "people.name", cascade=True),
        sa.PrimaryKeyConstraint("digest", name="pk_sign_ins"),
        sa.UniqueConstraint("id", name="uq_sign_ins_id"),
    )  # fmt: skip
    _index("ix_sign_ins_person", "sign_ins", ["person"])
    op.create_table(
        "tokens",
        _text("prefix"), _blob("digest"), _text("name"), _text("scopes"), _text("project", null=True),
        _text("job", null=True), _text("created_by"), _real("created_at"), _real("expires_at", null=True),
        _real("last_used_at", null=True), _real("revoked_at", null=True),
        _refers("tokens", "project", "projects.name"),
        sa.PrimaryKeyConstraint("prefix", name="pk_tokens"),
    )  # fmt: skip
    _index("ix_tokens_project", "tokens", ["project"])


def _create_checkpoints() -> None:
    op.create_table(
        "checkpoints",
        _text("job"), _text("id"), _integer("iteration"), _integer("lineage"), _real("at"), _text("kind"),
        _text("state"), _integer("payload_bytes"), _integer("reused_bytes"), _integer("raw_bytes"),
        _real("snapshot_started_at", null=True), _real("snapshot_seconds", null=True),
        _real("stall_seconds", null=True), _real("persist_started_at", null=True),
        _real("persist_seconds", null=True), _integer("durable_iteration", null=True),
        _text("reason", null=True), _integer("store_free_bytes", null=True), _blob("ranks", null=True),
        _text("label", null=True), _text("pinned_by", null=True), _real("pinned_at", null=True),
        _integer("attempt"), _integer("sequence"),
        _refers("checkpoints", "job", "jobs.name"),
        sa.PrimaryKeyConstraint("job", "id", name="pk_checkpoints"),
    )  # fmt: skip
    _index("ix_checkpoints_job_state_iteration", "checkpoints", ["job", "state", "iteration"])
    _index("ix_checkpoints_pinned", "checkpoints", ["job", "id"], where="pinned_at IS NOT NULL")
    _index("ix_checkpoints_taken", "checkpoints", ["job", sa.text("(coalesce(snapshot_started_at, at))")])
    op.create_table(
        "orders",
        _text("id"), _text("job"), _text("key"), _text("checkpoint"), _integer("iteration"), _text("state"),
        _real("created_at"), _text("who"), _integer("fence"), _real("expires_at", null=True),
        _text("overruled_state", null=True), _integer("taken_by_attempt", null=True),
        _integer("from_iteration"), _integer("from_lineage"), _integer("new_lineage", null=True),
        _text("reason", null=True), _real("seconds", null=True), _text("safety_checkpoint", null=True),
        _refers("orders", "job", "jobs.name"),
        sa.PrimaryKeyConstraint("id", name="pk_orders"),
        sa.UniqueConstraint("job", "key", name="uq_orders_job_key"),
    )  # fmt: skip
    _index("ix_orders_job_created_at", "orders", ["job", "created_at"])
    still_open = "state IN ('requested', 'delivered', 'restoring', 'unknown')"
    _index("uq_orders_open", "orders", ["job"], unique=True, where=still_open)
    op.create_table(
        "verifications",
        _text("job"), _text("checkpoint"), _integer("request"), _text("against", null=True),
        _text("asked_by"), _real("asked_at"), _text("state"), _real("at"), _text("host"),
        _integer("read_bytes"), _integer("total_bytes"), _real("seconds", null=True),
        _text("reason", null=True), _text("verdict", null=True), _real("verified_at", null=True),
        _text("verified_host"), _blob("tensors", null=True), _real("tensors_at", null=True),
        _text("tensors_against", null=True),
        _refers("verifications", "job", "jobs.name"),
        sa.PrimaryKeyConstraint("job", "checkpoint", name="pk_verifications"),
    )  # fmt: skip
    op.create_table(
        "order_transitions",
        _integer("id"), _text("order_id"), _text("state"), _real("at"), _text("who"),
        _text("reason", null=True),
        _refers("order_transitions", "order_id", "orders.id"),
        sa.PrimaryKeyConstraint("id", name="pk_order_transitions"),
    )  # fmt: skip
    _index("ix_order_transitions_order_id", "order_transitions", ["order_id"])


def _create_reports() -> None:
    op.create_table(
        "retentions",
        _text("project"), _real("samples_seconds", null=True), _real("fine_seconds", null=True),
        _real("reports_seconds", null=True), _integer("samples_bytes", null=True),
        _refers("retentions", "project", "projects.name"),
        sa.PrimaryKeyConstraint("project", name="pk_retentions"),
    )  # fmt: skip
    op.create_table(
        "annotations",
        _integer("id"), _text("job"), _real("at"), _integer("iteration"), _integer("lineage"),
        _text("text"), _text("who", null=True), _real("written_at"),
        _refers("annotations", "job", "jobs.name"),
        sa.PrimaryKeyConstraint("id", name="pk_annotations"),
    )  # fmt: skip
    _index("ix_annotations_job_at", "annotations", ["job", "at"])
    _index("ix_annotations_job_iteration", "annotations", ["job", "iteration"])
    op.create_table(
        "interval_decisions",
        _integer("id"), _text("job"), _real("at"), _integer("iteration"), _integer("lineage"),
        _integer("interval", null=True), _real("interval_seconds", null=True), _real("budget"),
        _real("measured_overhead", null=True),
        _refers("interval_decisions", "job", "jobs.name"),
        sa.PrimaryKeyConstraint("id", name="pk_interval_decisions"),
    )  # fmt: skip
    _index("ix_interval_decisions_job_at", "interval_decisions", ["job", "at"])
    _index("ix_interval_decisions_job_iteration", "interval_decisions", ["job", "iteration"])
    op.create_table(
        "notices",
        _integer("id"), _text("job"), _real("at"), _integer("iteration"), _integer("lineage"),
        _text("level"), _text("code"), _text("message"),
        _refers("notices", "job", "jobs.name"),
        sa.PrimaryKeyConstraint("id", name="pk_notices"),
    )  # fmt: skip
    _index("ix_notices_job_id", "notices", ["job", "id"])
    op.create_table(
        "stalls",
        _integer("id"), _text("job"), _real("at"), _integer("iteration"), _integer("lineage"),
        _text("kind"), _real("seconds"),
        _refers("stalls", "job", "jobs.name"),
        sa.PrimaryKeyConstraint("id", name="pk_stalls"),
    )  # fmt: skip
    _index("ix_stalls_job_at", "stalls", ["job", "at"])
    _index("ix_stalls_job_iteration", "stalls", ["job", "iteration"])
    _index("ix_stalls_job_kind_at", "stalls", ["job", "kind", "at"])


def _create_samples() -> None:
    op.create_table(
        "batches",
        _text("job"), _text("uid"), _integer("rank", autoincrement=False), _text("lane", default='control'),
        _integer("sequence", autoincrement=False), _real("received_at"), _blob("digest"),
        _boolean("covers_earlier"),
        _refers("batches", "job", "jobs.name"),
        sa.PrimaryKeyConstraint("job", "uid", "rank", "lane", "sequence", name="pk_batches"),
    )  # fmt: skip
    op.create_table(
        "chunks",
        _integer("id"), _text("job"), _text("uid"), _integer("attempt"), _integer("rank"),
        _integer("sequence"), _integer("lineage"), _integer("first_iteration"), _integer("last_iteration"),
        _real("first_at"), _real("last_at"), _integer("rows"), _real("seconds"), _blob("columns"),
        _refers("chunks", "job", "jobs.name"),
        sa.PrimaryKeyConstraint("id", name="pk_chunks"),
    )  # fmt: skip
    _index("ix_chunks_job_rank_lineage_first_iteration", "chunks", ["job", "rank", "lineage", "first_iteration"])
    op.create_table(
        "gaps",
        _integer("id"), _text("job"), _text("uid"), _integer("rank"), _integer("lineage"),
        _integer("first_iteration"), _integer("last_iteration"), _integer("dropped"), _real("at"),
        _refers("gaps", "job", "jobs.name"),
        sa.PrimaryKeyConstraint("id", name="pk_gaps"),
    )  # fmt: skip
    _index("ix_gaps_job_first_iteration", "gaps", ["job", "first_iteration"])
    op.create_table(
        "rank_totals",
        _text("job"), _integer("rank", autoincrement=False), _integer("bucket", autoincrement=False),
        _text("uid"), _integer("lineage", autoincrement=False), _integer("first_iteration"),
        _integer("last_iteration"), _real("begins_at"), _real("ends_at"), _integer("iterations"),
        _real("seconds"), _real("longest_seconds"), _real("stall_seconds"), _real("data_seconds"),
        _integer("barrier_iterations"), _real("barrier_seconds"),
        _refers("rank_totals", "job", "jobs.name"),
        sa.PrimaryKeyConstraint("job", "rank", "bucket", "uid", "lineage", name="pk_rank_totals"),
    )  # fmt: skip
    _index("ix_rank_totals_job_bucket", "rank_totals", ["job", "bucket"])
    op.create_table(
        "sample_series",
        _integer("id"), _text("job"), _text("uid"), _integer("attempt"), _integer("rank"),
        _integer("lineage"), _blob("metrics"), _integer("first_iteration"), _integer("last_iteration"),
        _real("last_at"), _integer("rows"), _integer("chunks"), _integer("chunk_bytes"),
        _integer("widest_chunk"), _integer("chunks_from", default=sa.text("0")),
        _integer("finest_from", default=sa.text("0")),
        _refers("sample_series", "job", "jobs.name"),
        sa.PrimaryKeyConstraint("id", name="pk_sample_series"),
        sa.UniqueConstraint("job", "rank", "lineage", "uid", name="uq_sample_series_job_rank_lineage_uid"),
    )  # fmt: skip
    _index("ix_sample_series_last_at", "sample_series", ["last_at"])
    op.create_table(
        "rollups",
        _integer("series", autoincrement=False), _integer("level", autoincrement=False),
        _integer("bucket", autoincrement=False), _integer("first_iteration"), _integer("last_iteration"),
        _integer("rows"), _blob("columns"),
        _refers("rollups", "series", "sample_series.id"),
        sa.PrimaryKeyConstraint("series", "level", "bucket", name="pk_rollups"),
    )  # fmt: skip


def _create_alerts() -> None:
    op.create_table(
        "alert_channels",
        _text("id"), _text("project"), _text("name"), _text("kind"), _text("target"), _text("secret"),
        _text("least_severity"), _boolean("enabled"), _real("created_at"), _text("created_by"),
        _refers("alert_channels", "project", "projects.name"),
        sa.PrimaryKeyConstraint("id", name="pk_alert_channels"),
    )  # fmt: skip
    _index("ix_alert_channels_project", "alert_channels", ["project"])
    op.create_table(
        "alert_rules",
        _text("project"), _text("name"), _text("kind"), _boolean("enabled"), _text("severity"),
        _real("limit_value"), _integer("window"), _real("for_seconds"), _text("jobs"), _real("changed_at"),
        _text("changed_by"),
        _refers("alert_rules", "project", "projects.name"),
        sa.PrimaryKeyConstraint("project", "name", name="pk_alert_rules"),
    )  # fmt: skip
    op.create_table(
        "alerts",
        _integer("id"), _text("project"), _text("job"), _text("rule"), _text("kind"), _text("severity"),
        _text("subject"), _real("value", null=True), _text("message"), _integer("iteration", null=True),
        _integer("lineage", null=True), _text("last_good", null=True), _real("since"),
        _real("fired_at", null=True), _real("clear_since", null=True), _real("acknowledged_at", null=True),
        _text("acknowledged_by", null=True), _real("silenced_until", null=True),
        _text("silenced_by", null=True), _real("resolved_at", null=True), _text("resolved_why", null=True),
        _refers("alerts", "job", "jobs.name"),
        _refers("alerts", "project", "projects.name"),
        sa.PrimaryKeyConstraint("id", name="pk_alerts"),
    )  # fmt: skip
    _index("ix_alerts_job_id", "alerts", ["job", "id"])
    _index("ix_alerts_project_id", "alerts", ["project", "id"])
    _index("ix_alerts_resolved_at_id", "alerts", ["resolved_at", "id"])
    _index("uq_alerts_open", "alerts", ["job", "rule"], unique=True, where="resolved_at IS NULL")
    op.create_table(
        "alert_deliveries",
        _integer("id"), _text("channel"), _integer("alert", null=True), _text("event"), _blob("payload"),
        _text("state"), _integer("tries"), _real("created_at"), _real("next_at"),
        _real("ended_at", null=True), _text("error", null=True),
        _refers("alert_deliveries", "alert", "alerts.id"),
        _refers("alert_deliveries", "channel", "alert_channels.id", cascade=True),
        sa.PrimaryKeyConstraint("id", name="pk_alert_deliveries"),
    )  # fmt: skip
    _index("ix_alert_deliveries_alert", "alert_deliveries", ["alert"])
    _index("ix_alert_deliveries_channel_id", "alert_deliveries", ["channel", "id"])
    _index("ix_alert_deliveries_due", "alert_deliveries", ["next_at"], where="state = 'waiting'")


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
