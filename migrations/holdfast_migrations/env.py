"""Environment of Alembic, with the connection that `holdfast_migrations.history` passes in a transaction.

The revisions name their tables and columns themselves. Only a comparison with the models passes `metadata`.
"""

from __future__ import annotations

from alembic import context

attributes = context.config.attributes
connection = attributes["connection"]
context.configure(
    connection=connection,
    target_metadata=attributes.get("metadata"),
    render_as_batch=connection.dialect.name == "sqlite",
    transactional_ddl=True,
    compare_type=True,
    compare_server_default=True,
)
with context.begin_transaction():
    context.run_migrations()
