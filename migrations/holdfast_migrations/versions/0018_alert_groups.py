"""Groups of alerts, runbooks of rules, routes of channels, and the comments on alerts."""

from __future__ import annotations

import msgspec
import sqlalchemy as sa
from alembic import op

revision: str = "0018"
down_revision: str | None = "0017"


def upgrade() -> None:
    number = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    op.add_column("alerts", sa.Column("group_id", number, nullable=True))
    op.create_index("ix_alerts_group_id", "alerts", ["group_id"])
    op.execute("UPDATE alerts SET group_id = id WHERE fired_at IS NOT NULL")
    op.add_column("alert_rules", sa.Column("runbook", sa.String(), nullable=False, server_default=""))
    for column in ("owner", "labels"):
        op.add_column("alert_channels", sa.Column(column, sa.String(), nullable=False, server_default=""))
    op.add_column("alert_deliveries", sa.Column("group_id", number, nullable=True))
    op.create_index("ix_alert_deliveries_group_id_channel", "alert_deliveries", ["group_id", "channel"])
    op.execute("UPDATE alert_deliveries SET group_id = alert")
    _group_by_messages()
    op.create_table(
        "alert_notes",
        sa.Column("id", number, nullable=False),
        sa.Column("alert", number, nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("who", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("text", sa.String(), nullable=False),
        sa.ForeignKeyConstraint(["alert"], ["alerts.id"], name="fk_alert_notes_alert_alerts", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name="pk_alert_notes"),
    )
    op.create_index("ix_alert_notes_alert_id", "alert_notes", ["alert", "id"])


def _group_by_messages() -> None:
    """Put open alerts that one message was about into one group: its incident ends with the last of them."""
    connection = op.get_bind()
    query = (
        "SELECT alert, payload FROM alert_deliveries JOIN alerts ON alerts.id = alert WHERE event = 'firing' "
        "AND state = 'delivered' AND resolved_at IS NULL ORDER BY alert_deliveries.id"
    )
    for alert, payload in connection.execute(sa.text(query)).all():
        first = msgspec.msgpack.decode(payload)["alert"]["id"]
        for table, column in (("alerts", "id"), ("alert_deliveries", "alert")):
            grouped = f"UPDATE {table} SET group_id = :first WHERE {column} = :alert"  # noqa: S608
            connection.execute(sa.text(grouped), {"first": first, "alert": alert})
