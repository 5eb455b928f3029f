"""Environment of Alembic, with the connection that `holdfast_migrations.history` passes in a transaction."""

from __future__ import annotations

from alembic import context

from holdfast_server.models import Base

connection = context.config.attributes["connection"]
context.configure(
    connection=connection,
    target_metadata=Base.metadata,
    render_as_batch=connection.dialect.name == "sqlite",
    transactional_ddl=True,
    compare_type=True,
    compare_server_default=True,
)
with context.begin_transaction():
    context.run_migrations()
