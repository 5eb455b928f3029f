"""Run by Alembic, by way of `holdfast_migrations.upgrade`."""

from __future__ import annotations

from alembic import context
from sqlalchemy import create_engine, event
from sqlalchemy.engine import Connection
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.pool import ConnectionPoolEntry

from holdfast_server.models import Base


def run() -> None:
    engine = create_engine(context.config.attributes["url"])

    @event.listens_for(engine, "connect")
    def configure(connection: DBAPIConnection, _: ConnectionPoolEntry) -> None:
        connection.isolation_level = None
        connection.cursor().execute("PRAGMA journal_mode=WAL")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # All of a migration or nothing: the driver's own transactions leave tables out.
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    try:
        with engine.connect() as connection:
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
    finally:
        engine.dispose()


run()
