"""Lanes, stretches of samples with their roll-ups, gaps, retention"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision: str = "0004"
down_revision: str | None = "0003"

NUMBER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
BATCH = ("job", "uid", "rank", "sequence")


def upgrade() -> None:
    op.add_column("jobs", sa.Column("samples_sequence", NUMBER, nullable=False, server_default=sa.text("-1")))
    with op.batch_alter_table("batches") as batches:
        batches.add_column(sa.Column("lane", sa.String(), nullable=False, server_default="control"))
        batches.drop_constraint(op.f("pk_batches"), type_="primary")
        batches.create_primary_key(op.f("pk_batches"), ["job", "uid", "rank", "lane", "sequence"])
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
        sa.Column("rolled_up", sa.Boolean(), nullable=False, server_default=sa.text("true")),
        sa.Column("whole_from", NUMBER, nullable=False, server_default=sa.text("0")),
        sa.Column("fine_from", NUMBER, nullable=False, server_default=sa.text("0")),
        sa.ForeignKeyConstraint(["job"], ["jobs.name"], name=op.f("fk_stretches_job_jobs")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_stretches")),
        sa.UniqueConstraint("job", "rank", "lineage", "uid", name=op.f("uq_stretches_job_rank_lineage_uid")),
    )
    op.create_index(op.f("ix_stretches_last_at"), "stretches", ["last_at"])
    _stretches_of_chunks()
    op.create_table(
        "rollups",
        sa.Column("stretch", NUMBER, nullable=False),
        sa.Column("level", NUMBER, nullable=False),
        sa.Column("bucket", NUMBER, nullable=False),
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
        "retentions",
        sa.Column("project", sa.String(), nullable=False),
        sa.Column("samples_seconds", sa.Double(), nullable=True),
        sa.Column("fine_seconds", sa.Double(), nullable=True),
        sa.Column("reports_seconds", sa.Double(), nullable=True),
        sa.Column("samples_bytes", NUMBER, nullable=True),
        sa.ForeignKeyConstraint(["project"], ["projects.name"], name=op.f("fk_retentions_project_projects")),
        sa.PrimaryKeyConstraint("project", name=op.f("pk_retentions")),
    )


def _stretches_of_chunks() -> None:
    """Of what is stored already. Its roll-ups are made by the server, in the background, from its chunks."""
    op.execute(
        sa.text(
            "INSERT INTO stretches (job, uid, attempt, rank, lineage, metrics, first_iteration, "
            "last_iteration, last_at, rows, chunks, chunk_bytes, widest, rolled_up) "
            "SELECT job, uid, max(attempt), rank, lineage, :no_metrics, min(first_iteration), "
            "max(last_iteration), max(last_at), sum(rows), count(*), sum(length(columns)), "
            "max(last_iteration - first_iteration), :no FROM chunks "
            "GROUP BY job, uid, rank, lineage ORDER BY min(id)"
        ).bindparams(
            sa.bindparam("no_metrics", b"\x90", sa.LargeBinary()), sa.bindparam("no", False, sa.Boolean())
        )
    )


def downgrade() -> None:
    op.drop_table("retentions")
    op.drop_table("gaps")
    op.drop_table("rollups")
    op.drop_table("stretches")
    # What an older version knows as the names of batches is without lanes, and those of samples end with them.
    op.execute(sa.text("DELETE FROM batches WHERE lane <> 'control'"))
    with op.batch_alter_table("batches") as batches:
        batches.drop_constraint(op.f("pk_batches"), type_="primary")
        batches.drop_column("lane")
        batches.create_primary_key(op.f("pk_batches"), list(BATCH))
    op.drop_column("jobs", "samples_sequence")
