"""Alerts"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision: str = "0006"
down_revision: str | None = "0005"


def upgrade() -> None:
    number = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    op.add_column("jobs", sa.Column("progressed_at", sa.Double(), nullable=True))
    op.add_column("checkpoints", sa.Column("store_free_bytes", number, nullable=True))
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
        sa.Column("id", number, nullable=False),
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
    open_ = sa.text("resolved_at IS NULL")
    op.create_index(
        "uq_alerts_open", "alerts", ["job", "rule"], unique=True, sqlite_where=open_, postgresql_where=open_
    )
    op.create_index(op.f("ix_alerts_project_id"), "alerts", ["project", "id"])
    op.create_index(op.f("ix_alerts_job_id"), "alerts", ["job", "id"])
    op.create_index(op.f("ix_alerts_resolved_at_id"), "alerts", ["resolved_at", "id"])
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
        sa.Column("id", number, nullable=False),
        sa.Column("channel", sa.String(), nullable=False),
        sa.Column("alert", number, nullable=True),
        sa.Column("event", sa.String(), nullable=False),
        sa.Column("payload", sa.LargeBinary(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("tries", number, nullable=False),
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
    waiting = sa.text("state = 'waiting'")
    op.create_index(
        "ix_alert_deliveries_due",
        "alert_deliveries",
        ["next_at"],
        sqlite_where=waiting,
        postgresql_where=waiting,
    )
    op.create_index(op.f("ix_alert_deliveries_channel_id"), "alert_deliveries", ["channel", "id"])


def downgrade() -> None:
    for table in ("alert_deliveries", "alert_channels", "alerts", "alert_rules"):
        op.drop_table(table)
    op.drop_column("checkpoints", "store_free_bytes")
    op.drop_column("jobs", "progressed_at")
