"""Projects"""

from __future__ import annotations

import time

import sqlalchemy as sa
from alembic import op

revision: str = "0003"
down_revision: str | None = "0002"

DEFAULT = "default"


def upgrade() -> None:
    projects = op.create_table(
        "projects",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_projects")),
    )
    op.bulk_insert(projects, [{"name": DEFAULT, "created_at": time.time()}])
    with op.batch_alter_table("jobs") as jobs:
        jobs.add_column(sa.Column("project", sa.String(), nullable=False, server_default=DEFAULT))
        jobs.create_foreign_key(op.f("fk_jobs_project_projects"), "projects", ["project"], ["name"])
        jobs.create_index(op.f("ix_jobs_project"), ["project"])


def downgrade() -> None:
    with op.batch_alter_table("jobs") as jobs:
        jobs.drop_index(op.f("ix_jobs_project"))
        jobs.drop_constraint(op.f("fk_jobs_project_projects"), type_="foreignkey")
        jobs.drop_column("project")
    op.drop_table("projects")
